"""NVFP4 against a slow reference in exact rational arithmetic, and against bytes that nvidia-modelopt wrote."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.numerics.e2m1 import VALUES
from distribute.numerics.nvfp4 import BLOCK, decode, encode, input_scale, scale_2
from tests.distribute.numerics.exact import E2M1, E4M3, FORMATS, nearest

FP32 = FORMATS[torch.float32]
DTYPES = pytest.mark.parametrize("dtype", list(FORMATS), ids=str)
GROUP_SIZES = pytest.mark.parametrize("group_size", [16, 32])
#: Sixteen quotients and the bytes that modelopt 0.47 packs them to: zeros, every tie, and what rounds to zero.
TIES = [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.75, -3.5, -6.0, 6.0, -0.1]
TIES_PACKED = "00204264 86cafe87"
#: Group size -> what modelopt 0.47 makes of `awkward(fp32)` for a bf16 model: codes, then group scales.
GOLDEN = {
    16: (
        "bfe5692ec7f45a0ed6724cafe6613db7"
        "00000000000000000000000000000000"
        "6010d0f05080d07040a0e07030c0f060"
        "08808008888000088880000880800808"
        "8000f88880000888e5682ec7f46a1ed6"
        "1018899110098991692ec7f46a0ed673"
        "1f1f38381f1d01017e1e011e"
    ),
    32: (
        "bfe5692ec7f45a0ed6724cafe6613db7"
        "00000000000000000000000000000000"
        "6010d0f05080d07040a0e06030c0f060"
        "08808008888000088880000880800808"
        "8000f888800008888008088080080880"
        "0008888000088880692ec7f46a0ed673"
        "1f381f017e1e"
    ),
}


def slow_group(group: list[float], rounded: list[float], scale: float) -> tuple[float, list[int]]:
    """The group scale and the codes of one group; `rounded` are its weights in the model's dtype."""
    six = nearest(6 * Fraction(scale), FP32)
    group_scale = nearest(max(abs(Fraction(w)) for w in group) / six, FP32) or Fraction(1)
    group_scale = nearest(min(max(group_scale, Fraction(1, 512)), Fraction(448)), E4M3)
    divisor = max(nearest(group_scale * Fraction(scale), FP32), Fraction(1, 2**149))
    return float(group_scale), [slow_code(w, divisor) for w in rounded]


def slow_code(weight: float, divisor: Fraction) -> int:
    """The code of one weight: divide, round to fp32, saturate, round to e2m1; the sign only of what is below zero."""
    if abs(weight) == float("inf"):
        return 7 | (weight < 0) << 3
    quotient = nearest(abs(Fraction(weight)) / divisor, FP32)
    code = VALUES.index(float(min(nearest(quotient, E2M1), Fraction(6))))
    return code | (weight < 0 and quotient != 0) << 3


def assert_as_slow(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, group_size: int = 16) -> None:
    codes, scales = encode(rows, scale, dtype=dtype, group_size=group_size)
    groups, rounded = rows.reshape(-1, group_size).tolist(), rows.to(dtype).reshape(-1, group_size).tolist()
    expected = [slow_group(*pair, scale.item()) for pair in zip(groups, rounded, strict=True)]
    assert scales.flatten().tolist() == [group_scale for group_scale, _ in expected]
    assert unpacked(codes).flatten().tolist() == [code for _, group in expected for code in group]


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def absmax(rows: torch.Tensor) -> torch.Tensor:
    return rows.abs().max().float()


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """[6, 32], the same on every machine: a ramp, zeros of both signs, subnormals, an outlier, small and mixed groups."""
    rows = (torch.arange(6 * 32, dtype=torch.float32).reshape(6, 32) * 37 % 101 - 50) / 64
    rows[1] = 0.0
    rows[2, ::2] = -0.0
    rows[3] *= torch.finfo(dtype).smallest_normal / 8
    rows[4, 5] = -3000.0
    rows[5, :16] *= 2.0**-9
    return rows.to(dtype)


@DTYPES
def test_ties_zeros_and_signs_get_the_references_bytes(dtype: torch.dtype) -> None:
    codes, scales = encode(torch.tensor([TIES]).to(dtype), torch.tensor(1.0), dtype=dtype)
    assert scales.tolist() == [[1.0]]
    assert codes.numpy().tobytes() == bytes.fromhex(TIES_PACKED)


def test_the_neighbours_of_ties_get_the_nearer_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    around = torch.cat(
        [ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(6.0)), torch.tensor([6.0, 0.0])]
    )
    assert_as_slow(torch.stack([around, -around]), torch.tensor(1.0), torch.float32)


def test_every_bf16_value_gets_the_nearest_code() -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    values = values[values.isfinite() & (values.abs() <= 6)]
    values = torch.cat([values, torch.zeros(-values.numel() % 15, dtype=values.dtype)]).reshape(-1, 15)
    rows = torch.cat([values, torch.full((len(values), 1), 6.0, dtype=values.dtype)], dim=1)  # group scale 1.0
    assert_as_slow(rows, torch.tensor(1.0), torch.bfloat16)


@DTYPES
@GROUP_SIZES
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_groups_are_scaled_and_coded_as_exact_arithmetic_does(dtype: torch.dtype, group_size: int, data) -> None:
    held = data.draw(st.sampled_from([dtype, torch.float32]))
    limit = 1.0 if held == torch.float16 else 2.0**100
    anything = st.floats(-limit, limit, width=16 if held == torch.float16 else 32)
    grid = st.integers(-48, 48).map(lambda n: n / 8)  # many ties
    values = data.draw(st.lists(st.one_of(anything, grid), min_size=2 * group_size, max_size=2 * group_size))
    rows = torch.tensor(values).to(held).reshape(1, -1)
    scale = scale_2(absmax(rows)) * data.draw(st.sampled_from([1.0, 1.7, 0.25]))  # 0.25: groups saturate
    assert_as_slow(rows, scale, dtype, group_size)


@DTYPES
@GROUP_SIZES
def test_awkward_rows_equal_the_slow_reference(dtype: torch.dtype, group_size: int) -> None:
    rows = awkward(dtype)
    assert_as_slow(rows, scale_2(absmax(rows)), torch.bfloat16, group_size)


@pytest.mark.parametrize(("group_size", "expected"), GOLDEN.items())
def test_awkward_rows_get_the_references_bytes(group_size: int, expected: str) -> None:
    rows = awkward(torch.float32)
    codes, scales = encode(rows, scale_2(absmax(rows)), dtype=torch.bfloat16, group_size=group_size)
    packed = codes.numpy().tobytes() + scales.view(torch.uint8).numpy().tobytes()
    assert packed == bytes.fromhex(expected)


def test_group_scales_come_from_the_weight_as_it_is_held() -> None:
    rows = torch.full((1, 16), 1.0 + 2.0**-9)  # bf16 has 1.0 for it
    scale = torch.tensor((1.0 + 2.0**-10) / (6 * 1.0625))  # between two e4m3 numbers, so that 2^-9 decides
    scales = {dtype: encode(rows.to(dtype), scale, dtype=torch.bfloat16)[1].item() for dtype in FORMATS}
    assert scales[torch.float32] > scales[torch.bfloat16]


@DTYPES
def test_row_slices_give_the_bytes_of_the_whole(dtype: torch.dtype) -> None:
    rows = torch.randn(2 * BLOCK // 4096 + 3, 4096, generator=torch.Generator().manual_seed(1)).to(dtype)
    scale = scale_2(absmax(rows))
    whole = encode(rows, scale, dtype=torch.bfloat16)
    cuts = [0, 1, 5, 64, rows.shape[0]]
    parts = [encode(rows[a:b], scale, dtype=torch.bfloat16) for a, b in itertools.pairwise(cuts)]
    for pieces, tensor in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat([piece.view(torch.uint8) for piece in pieces]), tensor.view(torch.uint8))


def test_rows_of_several_experts_are_coded_at_once() -> None:
    experts = (
        torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1.0, 30.0, 0.0])[:, None, None]
    )
    scales = scale_2(experts.abs().amax(dim=(1, 2)))
    together = encode(experts.flatten(0, 1), scales.repeat_interleave(4), dtype=torch.float32)
    alone = [encode(expert, scale, dtype=torch.float32) for expert, scale in zip(experts, scales, strict=True)]
    for whole, pieces in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole.view(torch.uint8), torch.cat([piece.view(torch.uint8) for piece in pieces]))
    decoded = decode(*together, scales.repeat_interleave(4)).reshape(3, 4, 32)
    assert torch.equal(decoded[1], decode(*alone[1], scales[1]))


@DTYPES
def test_an_all_zero_weight_has_scales_one_and_zero_codes(dtype: torch.dtype) -> None:
    rows = torch.zeros(5, 32, dtype=dtype)
    rows[1] = -0.0
    scale = scale_2(absmax(rows))
    codes, scales = encode(rows, scale, dtype=dtype)
    assert scale.equal(torch.tensor(1.0))
    assert torch.all(scales.float() == 1.0)
    assert not codes.any()


@pytest.mark.parametrize("tiny", [2.0**-149, 2.0**-140, 2.0**-133, 2.0**-126])
def test_the_least_weights_get_finite_scales_and_codes(tiny: float) -> None:
    rows = torch.tensor([[tiny] + [0.0] * 15, [-tiny] * 16, [tiny * 4000] * 16])
    scale = scale_2(absmax(rows))
    codes, scales = encode(rows, scale, dtype=torch.float32)
    assert scale > 0
    assert torch.all(scales.float() >= 2.0**-9)
    assert torch.all(decode(codes, scales, scale).isfinite())
    assert_as_slow(rows, scale, torch.float32)


def test_an_outlier_leaves_the_other_groups_the_least_scale() -> None:
    rows = torch.full((1, 32), 1e-4)
    rows[0, 31] = 1e6
    codes, scales = encode(rows, scale_2(absmax(rows)), dtype=torch.float32)
    assert scales.tolist() == [[2.0**-9, 448.0]]
    assert unpacked(codes)[0, 16:].tolist() == [0] * 15 + [7]


@DTYPES
def test_decoding_restores_the_values_within_a_quarter(dtype: torch.dtype) -> None:
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    scale = scale_2(absmax(rows))
    codes, scales = encode(rows, scale, dtype=dtype)
    decoded = decode(codes, scales, scale)
    assert decoded.dtype == torch.float32
    error = (decoded - rows.float()).abs().unflatten(1, (4, 16))
    largest = rows.float().abs().unflatten(1, (4, 16)).amax(dim=2, keepdim=True)
    # half of the largest step, 2 of 6, and the group scale's own 1/16
    assert torch.all(error <= largest * (1 / 6 + 1 / 16))


def test_every_code_decodes_to_its_value() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).reshape(1, 8)
    decoded = decode(packed, torch.tensor([[2.0]]).to(torch.float8_e4m3fn), torch.tensor(0.25))
    assert decoded.tolist() == [[value / 2 for value in VALUES]]


def test_input_scales_are_over_both_maxima_and_inputs_that_never_moved_count_as_six() -> None:
    assert input_scale(torch.tensor([3.0])).equal(torch.tensor(3.0) / torch.tensor(6 * 448.0))
    for absmax_value in (0.0, float("nan"), 2.0**-149):
        assert input_scale(torch.tensor(absmax_value)).equal(torch.tensor(1 / 448))


def test_rows_that_are_not_whole_groups_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="groups of 16 input features, but a row has 40"):
        encode(torch.zeros(2, 40), torch.tensor(1.0), dtype=torch.float32)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_nothing_is_coded_to_nothing(shape: tuple[int, int]) -> None:
    codes, scales = encode(torch.zeros(shape), torch.tensor(1.0), dtype=torch.bfloat16)
    assert codes.shape == (shape[0], shape[1] // 2)
    assert scales.shape == (shape[0], shape[1] // 16)


def test_encoding_leaves_the_weight_as_it_was_and_takes_any_strides() -> None:
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(4))
    before, scale = rows.clone(), scale_2(absmax(rows))
    straight = encode(rows.T.contiguous(), scale, dtype=torch.float32)[0]
    assert torch.equal(encode(rows.T, scale, dtype=torch.float32)[0], straight)
    assert torch.equal(rows, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@DTYPES
def test_a_gpu_writes_the_bytes_of_a_cpu(dtype: torch.dtype) -> None:
    rows = torch.randn(300, 1024, generator=torch.Generator().manual_seed(5)).to(dtype)
    scale = scale_2(absmax(rows))
    on_gpu = scale_2(absmax(rows.cuda()))
    assert torch.equal(on_gpu.cpu(), scale)
    for there, here in zip(encode(rows.cuda(), on_gpu, dtype=dtype), encode(rows, scale, dtype=dtype), strict=True):
        assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8))
