"""NVFP4 by the common protocol: modelopt's as `nvfp4.py` has it, compressed-tensors' against exact arithmetic."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.numerics import nvfp4
from distribute.numerics.e2m1 import VALUES
from distribute.numerics.nvfp4_codec import (
    CODECS,
    compressed_tensors_input_values,
    global_scale,
    modelopt_input_values,
)
from tests.distribute.numerics.exact import E2M1, E4M3, FORMATS, nearest
from tests.distribute.numerics.samples import DTYPES, absmax, raw, weight

CODEC = CODECS["nvfp4.compressed-tensors.16"]
FP32 = FORMATS[torch.float32]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slow_group(group: list[float], whole: Fraction, dtype: torch.dtype) -> tuple[float, list[int]]:
    """The group scale and the codes of one group."""
    sixth = nearest(nearest(max(abs(Fraction(w)) for w in group) / 6, FP32), FORMATS[dtype])
    scale = nearest(min(nearest(sixth * whole, FP32), Fraction(448)), E4M3) or Fraction(1, 8)
    divisor = nearest(scale / whole, FP32)
    quotients = [nearest(abs(Fraction(w)) / divisor, FP32) for w in group]
    codes = [VALUES.index(float(min(nearest(q, E2M1), Fraction(6)))) for q in quotients]
    return float(scale), [c | (w < 0 and q != 0) << 3 for c, w, q in zip(codes, group, quotients, strict=True)]


def assert_as_slow(rows: torch.Tensor, whole: torch.Tensor) -> None:
    stored = CODEC.encode(rows, {"weight_global_scale": whole})
    expected = [slow_group(group, Fraction(whole.item()), rows.dtype) for group in rows.reshape(-1, 16).tolist()]
    assert stored["weight_scale"].flatten().tolist() == [scale for scale, _ in expected]
    packed = stored["weight_packed"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten()
    assert codes.tolist() == [code for _, group in expected for code in group]


@EACH_DTYPE
def test_awkward_rows_equal_the_slow_reference(dtype: torch.dtype) -> None:
    rows = weight(dtype, 12, 96)
    assert_as_slow(rows, global_scale(absmax(rows), dtype))


@EACH_DTYPE
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_groups_are_scaled_and_coded_as_exact_arithmetic_does(dtype: torch.dtype, data) -> None:
    limit, width = (65504.0, 16) if dtype == torch.float16 else (2.0**100, 32)
    value = st.one_of(st.floats(-limit, limit, width=width), st.integers(-48, 48).map(lambda n: n / 8))
    rows = torch.tensor([data.draw(st.lists(value, min_size=32, max_size=32))]).to(dtype)
    factor = data.draw(st.sampled_from([1.0, 0.3, 4.0]))  # of a fused layer's other weights; 4.0: groups saturate
    assert_as_slow(rows, global_scale(absmax(rows), dtype) * factor)


@EACH_DTYPE
@settings(max_examples=100, deadline=None)
@given(value=st.floats(0.0, 65504.0, width=16))
def test_a_global_scale_is_two_roundings_from_the_quotient_and_always_a_number(dtype, value: float) -> None:
    held = torch.tensor(value).to(dtype)
    scale = global_scale(held.float(), dtype)
    assert (scale.shape, scale.dtype) == ((1,), torch.float32)
    assert torch.all(scale.isfinite() & (scale > 0))
    if held == 0:
        assert scale == 1.0
    else:
        unit = torch.finfo(dtype).eps
        of_subnormals = held.item() * torch.finfo(dtype).smallest_normal * unit / 2  # the reciprocal may be one
        assert abs(scale.item() * held.item() / 2688 - 1) <= unit * (1 + unit) + of_subnormals


@pytest.mark.parametrize("value", [0.0, 2.0**-149, 2.0**-127, float("nan")])
@EACH_DTYPE
def test_what_never_moved_or_hardly_gets_the_global_scale_one(dtype: torch.dtype, value: float) -> None:
    assert global_scale(torch.tensor(value), dtype).tolist() == [1.0]


def test_small_fp16_weights_keep_their_precision() -> None:
    """The reference's global scale is 1.0 here, which leaves most groups the least scale."""
    rows = (torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) / 200).half()
    values = CODEC.weight_values(absmax(rows), (8, 64), rows.dtype)
    decoded = CODEC.decode(CODEC.encode(rows, values) | values, 64)
    assert (decoded - rows.float()).norm() < 0.12 * rows.float().norm()


@EACH_DTYPE
def test_group_scales_that_vanish_are_an_eighth(dtype: torch.dtype) -> None:
    rows = torch.zeros(1, 32, dtype=dtype)
    rows[0, 0] = 1.0
    stored = CODEC.encode(rows, CODEC.weight_values(absmax(rows), (1, 32), dtype))
    assert stored["weight_scale"].tolist() == [[448.0, 0.125]]


@pytest.mark.parametrize("group_size", [16, 32])
@EACH_DTYPE
def test_modelopts_codec_gives_the_bytes_of_its_arithmetic(dtype: torch.dtype, group_size: int) -> None:
    rows, codec = weight(dtype), CODECS[f"nvfp4.modelopt.{group_size}"]
    values = codec.weight_values(absmax(rows), (37, 256), dtype)
    assert values["weight_scale_2"].equal(nvfp4.scale_2(absmax(rows)))
    stored = codec.encode(rows, values)
    codes, scales = nvfp4.encode(rows, values["weight_scale_2"], dtype=dtype, group_size=group_size)
    assert torch.equal(raw(stored["weight"]), raw(codes))
    assert torch.equal(raw(stored["weight_scale"]), raw(scales))


def test_input_scales_carry_the_name_and_the_direction_of_their_dialect() -> None:
    inputs = torch.tensor(3.0)
    assert modelopt_input_values(inputs, torch.bfloat16)["input_scale"].equal(torch.tensor(3.0) / 2688)
    divisor = compressed_tensors_input_values(inputs, torch.float32)["input_global_scale"]
    assert divisor.equal(torch.tensor([3.0]).reciprocal() * 2688)


def test_rows_that_are_not_whole_groups_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="groups of 16 input features, but a row has 40"):
        CODEC.encode(torch.zeros(2, 40), {"weight_global_scale": torch.ones(1)})


def test_a_sixth_of_the_largest_magnitude_is_rounded_to_the_models_dtype() -> None:
    """Every mantissa of bf16 under several global scales: some group scales turn on that rounding."""
    rows = (1 + torch.arange(128) / 128)[:, None] * torch.tensor([1.0] + [0.0] * 15)
    scales = {dtype: [] for dtype in (torch.bfloat16, torch.float32)}
    for whole in torch.linspace(1000, 1300, 8).split(1):
        for dtype, found in scales.items():
            assert_as_slow(rows.to(dtype), whole)
            found += CODEC.encode(rows.to(dtype), {"weight_global_scale": whole})["weight_scale"].flatten().tolist()
    assert scales[torch.bfloat16] != scales[torch.float32]
