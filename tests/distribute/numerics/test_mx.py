"""MXFP4 and MXFP8 against a slow reference in exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distribute.numerics.e2m1 import VALUES, unpack
from distribute.numerics.mx import BLOCK, CODECS, MxCodec
from tests.distribute.numerics.exact import E2M1, E4M3, FORMATS, nearest
from tests.distribute.numerics.samples import DTYPES, raw, weight

FP32 = FORMATS[torch.float32]
EACH_CODEC = pytest.mark.parametrize("name", CODECS)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
MODELOPT = ["mxfp4.modelopt.32", "mxfp8.modelopt.32"]
COMPRESSED_TENSORS = ["mxfp4.compressed-tensors.32", "mxfp8.compressed-tensors.32"]


def slow_byte(name: str, absmax: Fraction, dtype: torch.dtype) -> int:
    largest = 6 if name.startswith("mxfp4") else 448
    if "modelopt" in name:
        scale = nearest(absmax / largest, FP32)
        log2 = Fraction(math.log2(scale)) if scale else Fraction(-127)
        rounded = nearest(abs(log2), FP32) * (-1 if log2 < 0 else 1)
        return max(math.ceil(rounded), -127) + 127
    least = round(math.log2(torch.finfo(dtype).smallest_normal))
    if absmax < Fraction(2) ** least * Fraction(
        3, 4
    ):  # the dtype's subnormal numbers round to 0 or to the least normal
        return 127 if dtype == torch.float16 else 0
    exponent = math.frexp(absmax)[1] - 1
    rounded_up = max(exponent + (absmax >= Fraction(2) ** exponent * Fraction(7, 4)), least)
    return max(rounded_up - math.floor(math.log2(largest)) + 127, 0)


def slow_value(name: str, weight: float, byte: int, dtype: torch.dtype) -> float:
    """The code of one weight, as a number with the sign that is stored."""
    quotient = nearest(
        abs(Fraction(weight)) / Fraction(2) ** (byte - 127), FORMATS[dtype] if "comp" in name else FP32
    )
    sign = math.copysign(1.0, weight)
    if name == "mxfp4.modelopt.32":
        code = sum(quotient > tie for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5))
        return math.copysign(VALUES[code], -1.0 if quotient == 0 else sign)
    if quotient == 0 and "compressed" in name:
        sign = 1.0
    largest, elements = (6, E2M1) if name.startswith("mxfp4") else (448, E4M3)
    return math.copysign(float(nearest(min(quotient, Fraction(largest)), elements)), sign)


def with_signs(codec: MxCodec, stored: torch.Tensor) -> torch.Tensor:
    """Codes as numbers, zeros with their sign: code 8 of e2m1 is -0.0."""
    if stored.dtype != torch.uint8:
        return stored.float()
    codes = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(1)
    return torch.where(codes == 8, -0.0, unpack(stored))


def assert_as_slow(name: str, rows: torch.Tensor) -> None:
    codec = CODECS[name]
    stored = codec.encode(rows, {})
    groups = rows.reshape(-1, 32).tolist()
    expected = [slow_byte(name, max(abs(Fraction(w)) for w in group), rows.dtype) for group in groups]
    assert stored["weight_scale"].flatten().tolist() == expected
    values = [
        slow_value(name, w, byte, rows.dtype) for group, byte in zip(groups, expected, strict=True) for w in group
    ]
    assert torch.equal(raw(with_signs(codec, stored[codec.element.suffix])), raw(torch.tensor(values)))


@EACH_CODEC
@EACH_DTYPE
def test_awkward_rows_equal_the_slow_reference(name: str, dtype: torch.dtype) -> None:
    assert_as_slow(name, weight(dtype, 12, 96))


@EACH_CODEC
@EACH_DTYPE
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_groups_are_scaled_and_coded_as_exact_arithmetic_does(name: str, dtype: torch.dtype, data) -> None:
    limit, width = (65504.0, 16) if dtype == torch.float16 else (2.0**127, 32)
    anything = st.floats(-limit, limit, width=width)
    ties = st.integers(-64, 64).map(lambda n: n / 8)
    values = data.draw(st.lists(st.one_of(anything, ties), min_size=32, max_size=32))
    assert_as_slow(name, torch.tensor([values]).to(dtype))


@EACH_CODEC
@EACH_DTYPE
def test_the_scale_turns_where_it_should_at_every_power_of_two(name: str, dtype: torch.dtype) -> None:
    """Largest magnitudes at and around powers of two, and 1.5, 1.75 times them, over all of the dtype's range."""
    info = torch.finfo(dtype)
    powers = 2.0 ** torch.arange(math.log2(info.smallest_normal) - 3, math.log2(info.max), 5, dtype=torch.float64)
    turns = torch.cat([powers * factor for factor in (1, 1.5, 1.75)]).to(dtype)
    up, down = turns.nextafter(torch.full_like(turns, info.max)), turns.nextafter(torch.zeros_like(turns))
    rows = torch.cat([turns, up, down])[:, None] * torch.tensor([1.0, -0.75, *[0.0] * 30]).to(dtype)
    assert_as_slow(name, rows)


@pytest.mark.parametrize("name", MODELOPT)
@settings(max_examples=200, deadline=None)
@given(absmax=st.floats(2.0**-118, 2.0**127, width=32))
@example(6.0)
@example(448.0)
@example(float(torch.tensor(448.0).nextafter(torch.tensor(500.0))))
def test_modelopts_scale_is_the_least_power_of_two_that_covers_the_group(name: str, absmax: float) -> None:
    byte = CODECS[name].encode(torch.full((1, 32), absmax), {})["weight_scale"].item()
    largest = Fraction(CODECS[name].element.largest)
    # two roundings to 24 bits, of the quotient and of its logarithm, which may have seven bits before the point
    slack = 1 + Fraction(2) ** -17
    assert Fraction(absmax) <= largest * Fraction(2) ** (byte - 127) * slack
    assert Fraction(absmax) * slack > largest * Fraction(2) ** (byte - 128)


@EACH_CODEC
@EACH_DTYPE
def test_a_group_of_zeros_gets_the_scale_of_its_dialect_and_zero_codes(name: str, dtype: torch.dtype) -> None:
    stored = CODECS[name].encode(torch.zeros(2, 64, dtype=dtype), {})
    in_fp16 = "compressed" in name and dtype == torch.float16
    assert torch.all(stored["weight_scale"] == (127 if in_fp16 else 0))
    assert not CODECS[name].decode(stored, 64).any()
    assert torch.all(stored[CODECS[name].element.suffix].view(torch.uint8) == (0x88 if name == MODELOPT[0] else 0))


@pytest.mark.parametrize("name", COMPRESSED_TENSORS)
def test_the_largest_numbers_of_fp16_keep_their_size(name: str) -> None:
    """The reference's scale is infinite here: what it rounds up leaves the dtype."""
    rows = torch.tensor([[57344.0, 65504.0] * 16], dtype=torch.float16)
    decoded = CODECS[name].decode(CODECS[name].encode(rows, {}), 32)
    assert torch.all((decoded / rows.float() - 1).abs() < 0.15)


@EACH_CODEC
@EACH_DTYPE
def test_no_number_is_so_large_that_its_scale_is_none(name: str, dtype: torch.dtype) -> None:
    rows = torch.full((1, 32), torch.finfo(dtype).max, dtype=dtype)
    assert CODECS[name].encode(rows, {})["weight_scale"].item() < 255


@EACH_CODEC
def test_more_rows_than_a_block_equal_few(name: str) -> None:
    rows = weight(torch.bfloat16, 2 * BLOCK // 4096 + 3, 4096)
    whole, few = CODECS[name].encode(rows, {}), CODECS[name].encode(rows[-5:], {})
    assert all(torch.equal(raw(whole[suffix][-5:]), raw(tensor)) for suffix, tensor in few.items())


@EACH_CODEC
def test_rows_that_are_not_whole_groups_are_refused_with_both_numbers(name: str) -> None:
    with pytest.raises(ValueError, match="groups of 32 input features, but a row has 40"):
        CODECS[name].encode(torch.zeros(2, 40), {})
