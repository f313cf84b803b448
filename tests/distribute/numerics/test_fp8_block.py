"""FP8 in square blocks against a slow reference in exact rational arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.numerics.fp8_block import CODECS, COLUMNS, SIZE
from tests.distribute.numerics.exact import E4M3, FORMATS, nearest
from tests.distribute.numerics.samples import DTYPES, raw, weight

MODELOPT, COMPRESSED_TENSORS = CODECS
FP32 = FORMATS[torch.float32]
EACH_CODEC = pytest.mark.parametrize("name", CODECS)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slow_scale(name: str, absmax: Fraction, dtype: torch.dtype) -> Fraction:
    info = torch.finfo(dtype)
    if name == MODELOPT:
        return nearest(max(absmax or Fraction(448), Fraction(info.tiny)) / 448, FP32)
    return nearest(nearest(absmax / 448, FP32), FORMATS[dtype]) or Fraction(info.eps)


def slow_value(name: str, weight: float, scale: Fraction, dtype: torch.dtype) -> float:
    """The code of one weight, as a number with the sign that is stored."""
    quotient = nearest(abs(Fraction(weight)) / scale, FP32)
    if name == COMPRESSED_TENSORS:
        quotient = nearest(quotient, FORMATS[dtype])
    sign = 1.0 if quotient == 0 and name == COMPRESSED_TENSORS else math.copysign(1.0, weight)
    return math.copysign(float(nearest(min(quotient, Fraction(448)), E4M3)), sign)


def assert_as_slow(name: str, rows: torch.Tensor) -> None:
    stored = CODECS[name].encode(rows, {})
    scales = stored["weight_scale"].reshape(math.ceil(rows.shape[0] / SIZE), math.ceil(rows.shape[1] / SIZE))
    for i, strip in enumerate(rows.split(SIZE)):
        for j, block in enumerate(strip.split(SIZE, dim=1)):
            scale = slow_scale(name, max(abs(Fraction(w)) for w in block.flatten().tolist()), rows.dtype)
            assert Fraction(scales[i, j].item()) == scale
            values = [[slow_value(name, w, scale, rows.dtype) for w in row] for row in block.tolist()]
            ours = stored["weight"][i * SIZE : (i + 1) * SIZE, j * SIZE : (j + 1) * SIZE].float()
            assert torch.equal(raw(ours), raw(torch.tensor(values)))


@EACH_CODEC
@EACH_DTYPE
def test_awkward_rows_with_parts_of_blocks_equal_the_slow_reference(name: str, dtype: torch.dtype) -> None:
    assert_as_slow(name, weight(dtype, 131, 140))


@EACH_CODEC
@EACH_DTYPE
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_blocks_are_scaled_and_coded_as_exact_arithmetic_does(name: str, dtype: torch.dtype, data) -> None:
    limit, width = (65504.0, 16) if dtype == torch.float16 else (2.0**127, 32)
    value = st.one_of(st.floats(-limit, limit, width=width), st.integers(-64, 64).map(lambda n: n / 8))
    columns = data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(st.lists(value, min_size=columns, max_size=columns), min_size=1, max_size=3))
    assert_as_slow(name, torch.tensor(rows).to(dtype))


@EACH_CODEC
@EACH_DTYPE
@pytest.mark.parametrize(("shape", "blocks"), [((300, 200), (3, 2)), ((1, 1), (1, 1)), ((128, 256), (1, 2))])
def test_scales_have_the_shape_and_dtype_of_their_dialect(name, dtype, shape, blocks) -> None:
    stored = CODECS[name].encode(torch.ones(shape, dtype=dtype), {})
    assert stored["weight"].shape == shape
    expected = (blocks[0], 1, blocks[1], 1) if name == MODELOPT else blocks
    assert stored["weight_scale"].shape == expected
    assert stored["weight_scale"].dtype == (torch.float32 if name == MODELOPT else dtype)


@EACH_CODEC
@EACH_DTYPE
def test_an_outlier_and_zeros_change_the_scale_of_their_own_block_only(name: str, dtype: torch.dtype) -> None:
    rows = torch.ones(256, 256, dtype=dtype)
    rows[200, 10] = 448.0
    rows[:128, :128] = 0.0
    scale = CODECS[name].encode(rows, {})["weight_scale"].reshape(2, 2)
    of_ones = torch.tensor(1 / 448).to(scale.dtype).item()
    of_zeros = 1.0 if name == MODELOPT else torch.finfo(dtype).eps
    assert scale.tolist() == [[of_zeros, of_ones], [1.0, of_ones]]


@EACH_CODEC
def test_wide_rows_equal_their_parts(name: str) -> None:
    rows = weight(torch.bfloat16, 130, 2 * COLUMNS + 200)
    whole, right = CODECS[name].encode(rows, {}), CODECS[name].encode(rows[:, COLUMNS:], {})
    assert torch.equal(raw(whole["weight"][:, COLUMNS:]), raw(right["weight"]))
    scales = whole["weight_scale"].reshape(2, -1)[:, COLUMNS // SIZE :]
    assert torch.equal(scales, right["weight_scale"].reshape(2, -1))
