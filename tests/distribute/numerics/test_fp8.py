"""FP8 codecs against a slow reference in exact rational arithmetic."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.numerics.fp8 import BLOCK, CODECS, Codec, to_fp32
from tests.distribute.numerics.exact import E4M3, FORMATS, nearest

DTYPES = list(FORMATS)
ALL_CODECS = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
PER_CHANNEL = pytest.mark.parametrize("codec", [c for c in CODECS.values() if c.per_row], ids=lambda c: c.name)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slow_code(codec: Codec, weight: float, scale: float, dtype: torch.dtype) -> int:
    """The byte of one weight: divide, round to fp32, to the codec's dtype, saturate, round to e4m3."""
    negative = math.copysign(1.0, weight) < 0
    quotient = nearest(abs(Fraction(weight)) / Fraction(scale), FORMATS[torch.float32])
    through = torch.float32 if codec.name == "fp8.modelopt.channel" else dtype
    quotient = min(nearest(quotient, FORMATS[through]), Fraction(448))
    if quotient == 0 and codec.name.startswith("fp8.compressed-tensors"):
        negative = False  # adding a zero point of 0 makes -0 a +0
    return negative << 7 | e4m3_byte(nearest(quotient, E4M3))


def e4m3_byte(magnitude: Fraction) -> int:
    """Exponent (bias 7) and mantissa bits of a representable magnitude."""
    for exponent in range(15, 0, -1):
        mantissa = magnitude / Fraction(2) ** (exponent - 7) - 1
        if mantissa >= 0:
            return exponent << 3 | int(mantissa * 8)
    return int(magnitude * 2**9)


def as_scale(codec: Codec, values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """A scale in the shape and dtype of the codec's own scales."""
    like = codec.weight_scale(torch.ones(len(values)), dtype)
    return (
        torch.tensor(values if codec.per_row else values[:1], dtype=torch.float32).to(like.dtype).reshape(like.shape)
    )


def finite_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a two-byte dtype, both zeros included."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return every[every.isfinite()]


def weights(dtype: torch.dtype, rows: int = 37, columns: int = 24) -> torch.Tensor:
    """Random weights with a zero row, a row of negative zeros, a subnormal row and an outlier."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    weight[3] = 0.0
    weight[4] = -0.0
    weight[5] *= torch.finfo(dtype).smallest_normal / 8
    weight[6, 7] = 3000.0
    return weight.to(dtype)


def row_absmax(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(dim=1).float()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8.modelopt.tensor", torch.bfloat16),
        ("fp8.modelopt.channel", torch.float16),
        ("fp8.compressed-tensors.tensor", torch.bfloat16),
    ],
)
def test_every_value_of_a_two_byte_dtype_gets_the_nearest_code(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    values = finite_patterns(dtype)
    codes = codec.encode(values.reshape(1, -1), as_scale(codec, [1.0], dtype)).view(torch.uint8)[0]
    expected = [slow_code(codec, value, 1.0, dtype) for value in values.tolist()]
    assert codes.tolist() == expected


@ALL_CODECS
@EACH_DTYPE
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_quotients_are_rounded_as_exact_arithmetic_rounds_them(codec: Codec, dtype: torch.dtype, data) -> None:
    width = 16 if dtype == torch.float16 else 32
    value = st.floats(width=width, allow_nan=False, allow_infinity=False)
    rows = torch.tensor(data.draw(st.lists(value, min_size=1, max_size=8))).to(dtype)
    rows = rows[rows.isfinite()].reshape(1, -1)
    scale = as_scale(codec, [data.draw(st.floats(2.0**-14, 2.0**14, width=width))], dtype)
    codes = codec.encode(rows, scale).view(torch.uint8)[0].tolist()
    assert codes == [slow_code(codec, value, scale.float().item(), dtype) for value in rows[0].tolist()]


@ALL_CODECS
@EACH_DTYPE
def test_codes_under_the_own_scale_equal_the_slow_reference(codec: Codec, dtype: torch.dtype) -> None:
    weight = weights(dtype)
    scale = codec.weight_scale(row_absmax(weight), dtype)
    codes = codec.encode(weight, scale).view(torch.uint8).tolist()
    per_row = scale.float().reshape(-1).expand(weight.shape[0]).tolist()
    expected = [
        [slow_code(codec, value, scale, dtype) for value in row]
        for row, scale in zip(weight.tolist(), per_row, strict=True)
    ]
    assert codes == expected


@ALL_CODECS
@EACH_DTYPE
def test_row_slices_give_the_bytes_of_the_whole(codec: Codec, dtype: torch.dtype) -> None:
    weight = weights(dtype, rows=2 * BLOCK // 4096 + 3, columns=4096)  # more than two blocks
    scale = codec.weight_scale(row_absmax(weight), dtype)
    whole = codec.encode(weight, scale).view(torch.uint8)
    cuts = [0, 1, 5, 64, weight.shape[0]]
    parts = [codec.encode(weight[a:b], codec.scale_of_rows(scale, range(a, b))) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat([part.view(torch.uint8) for part in parts]), whole)


@ALL_CODECS
@EACH_DTYPE
def test_an_all_zero_weight_has_scale_one_and_zero_codes(codec: Codec, dtype: torch.dtype) -> None:
    weight = torch.zeros(5, 8, dtype=dtype)
    scale = codec.weight_scale(row_absmax(weight), dtype)
    assert torch.all(scale == 1.0)
    assert not codec.encode(weight, scale).view(torch.uint8).any()


@PER_CHANNEL
@EACH_DTYPE
def test_a_zero_row_follows_its_dialect(codec: Codec, dtype: torch.dtype) -> None:
    scale = codec.weight_scale(row_absmax(weights(dtype)), dtype)
    expected = 1.0 if codec.name.startswith("fp8.modelopt") else torch.finfo(dtype).eps
    assert scale.flatten()[3] == expected


@ALL_CODECS
@EACH_DTYPE
@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.floats(0.0, 65504.0, width=32), min_size=1, max_size=6))
def test_a_scale_is_finite_and_positive_and_no_code_is_nan(
    codec: Codec, dtype: torch.dtype, rows: list[float]
) -> None:
    weight = torch.tensor(rows).reshape(-1, 1).to(dtype)
    scale = codec.weight_scale(row_absmax(weight), dtype)
    assert torch.all(scale.isfinite() & (scale > 0))
    assert torch.all(codec.decode(codec.encode(weight, scale), scale).isfinite())


@ALL_CODECS
@EACH_DTYPE
def test_decoding_restores_normal_values_within_a_sixteenth(codec: Codec, dtype: torch.dtype) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    scale = codec.weight_scale(row_absmax(weight), dtype)
    decoded = codec.decode(codec.encode(weight, scale), scale)
    step = scale.float().max() * 2.0**-9
    assert decoded.dtype == torch.float32
    # half a unit in the last of 4 bits, plus what rounding the quotient to a short dtype costs
    assert torch.all((decoded - weight.float()).abs() <= weight.float().abs() * (1 / 16 + 1 / 256) + step)


@pytest.mark.parametrize("name", ["fp8.modelopt.tensor", "fp8.modelopt.channel"])
def test_modelopt_scales_are_fp32_and_inputs_that_never_moved_get_one(name: str) -> None:
    codec = CODECS[name]
    assert codec.input_scale(torch.tensor(0.0), torch.bfloat16).equal(torch.tensor(1.0))
    assert codec.input_scale(torch.tensor(3.0), torch.bfloat16).equal(torch.tensor(3.0) / torch.tensor(448.0))
    assert codec.weight_scale(torch.ones(4), torch.bfloat16).shape == ((4,) if codec.per_row else ())


@pytest.mark.parametrize("name", ["fp8.compressed-tensors.tensor", "fp8.compressed-tensors.channel"])
@EACH_DTYPE
def test_compressed_tensors_scales_have_the_models_dtype(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    assert codec.input_scale(torch.tensor(0.0), dtype).equal(torch.tensor([torch.finfo(dtype).eps], dtype=dtype))
    assert codec.input_scale(torch.tensor(3.0), dtype).equal(torch.tensor([3.0 / 448.0]).to(dtype))
    assert codec.weight_scale(torch.ones(4), dtype).shape == ((4, 1) if codec.per_row else (1,))


@ALL_CODECS
def test_encoding_leaves_the_weight_as_it_was(codec: Codec) -> None:
    weight = weights(torch.float32)
    before = weight.clone()
    codec.encode(weight, codec.weight_scale(row_absmax(weight), torch.float32))
    assert torch.equal(weight, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@ALL_CODECS
@EACH_DTYPE
def test_a_gpu_writes_the_bytes_of_a_cpu(codec: Codec, dtype: torch.dtype) -> None:
    weight = torch.randn(300, 1000, generator=torch.Generator().manual_seed(3)).to(dtype)
    scale = codec.weight_scale(row_absmax(weight), dtype)
    on_gpu = codec.weight_scale(row_absmax(weight.cuda()), dtype)
    assert torch.equal(on_gpu.cpu(), scale)
    codes = codec.encode(weight.cuda(), on_gpu).cpu()
    assert torch.equal(codes.view(torch.uint8), codec.encode(weight, scale).view(torch.uint8))


def test_the_table_of_codes_has_the_values_of_torchs_own_cast() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    values = to_fp32(codes.T)
    assert torch.equal(values.view(torch.int32), codes.T.to(torch.float32).view(torch.int32))
    assert values.isnan().sum() == 2
