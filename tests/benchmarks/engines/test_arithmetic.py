"""The arithmetic that stands in for missing kernels, on values worked out by hand."""

import torch

from benchmarks.engines.readers.arithmetic import (
    block_matmul,
    decode_packed_int8,
    dequantize_mxfp4,
    quantize_fp8,
    round_to_mxfp4,
    scaled_matmul,
)


def test_mxfp4_rounds_ties_to_even_codes_and_keeps_what_the_format_has() -> None:
    x = torch.zeros(1, 64)
    x[0, :12] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -3.0, 0.26, 6.9])
    x[0, 32:34] = torch.tensor([7.0, 5.0]) * 2.0**-60  # from 7 on, the scale is twice as large
    expected = torch.zeros(1, 64)
    expected[0, :12] = torch.tensor([4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0, -3.0, 0.5, 6.0])
    expected[0, 32:34] = torch.tensor([8.0, 4.0]) * 2.0**-60
    assert torch.equal(round_to_mxfp4(x), expected)
    assert torch.equal(round_to_mxfp4(torch.zeros(2, 32, dtype=torch.bfloat16)), torch.zeros(2, 32).bfloat16())


def test_mxfp4_decodes_the_low_half_of_a_byte_first() -> None:
    codes = torch.full((1, 32), 0x00, dtype=torch.uint8)
    codes[0, 0] = 0x2F  # -6, then 1
    codes[0, 16] = 0x71  # in the second group: 0.5, then 6
    scales = torch.tensor([[127, 129]], dtype=torch.uint8)
    values = dequantize_mxfp4(codes, scales, torch.float32)
    assert values.shape == (1, 64)
    assert values[0, :2].tolist() == [-6.0, 1.0]
    assert values[0, 32:34].tolist() == [2.0, 24.0]
    assert values.count_nonzero() == 4


def test_mxfp4_values_stay_when_rounded_again() -> None:
    codes = torch.randint(0, 256, (8, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codes[:, ::16] = 0x77  # the largest value in each group, so that the scale is found again
    values = dequantize_mxfp4(codes, torch.full((8, 2), 120, dtype=torch.uint8), torch.float32)
    assert torch.equal(round_to_mxfp4(values), values)


def test_fp8_scales_of_rows_tensor_and_given() -> None:
    x = torch.tensor([[448.0, -4.0], [1.0, 0.5]])
    codes, scale = quantize_fp8(x, use_per_token_if_dynamic=True)
    assert torch.equal(scale, torch.tensor([[448.0], [1.0]]) / 448)
    assert codes.float().tolist() == [[448.0, -4.0], [448.0, 224.0]]
    codes, scale = quantize_fp8(x)
    assert scale.tolist() == [1.0] and codes.float().tolist() == x.tolist()
    codes, scale = quantize_fp8(x, torch.tensor(0.5), num_token_padding=3)
    assert codes.shape == (3, 2) and codes[0].tolist() == [448.0, -8.0] and codes[2].tolist() == [0.0, 0.0]
    out = torch.empty(2, 2, dtype=torch.float8_e4m3fn)
    assert quantize_fp8(x, torch.tensor(1.0), output=out)[0] is out and out.float().tolist() == x.tolist()


def test_products_apply_the_scales_of_rows_columns_and_blocks() -> None:
    left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [2.0]])
    product = scaled_matmul(
        left,
        right,
        torch.tensor([[2.0], [1.0]]),
        torch.tensor(10.0),
        bias=torch.tensor([1.0]),
        out_dtype=torch.float32,
    )
    assert product.tolist() == [[101.0], [111.0]]
    inputs, weight = torch.ones(2, 130), torch.ones(129, 130)
    result = block_matmul(
        inputs, weight, torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    )
    assert result.shape == (2, 129)
    assert result[:, 0].tolist() == [128 + 2 * 2 * 3, 2 * 3.0]
    assert result[:, 128].tolist() == [128 * 5 + 2 * 2 * 7, 2 * 7.0]


def test_packed_int8_has_the_first_code_in_the_lowest_byte_and_128_on_top() -> None:
    packed = torch.tensor([[0xFF818000 - 2**32, 0x80808080 - 2**32]], dtype=torch.int64).to(torch.int32)
    expected = torch.tensor([[-128.0, 0.0, 1.0, 127.0, 0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(decode_packed_int8(packed, torch.tensor([[2.0]])), 2 * expected)
    assert torch.equal(decode_packed_int8(packed, torch.tensor([[0.5, 9.0]])), 0.5 * expected)
