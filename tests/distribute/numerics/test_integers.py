"""Int8 and int4 against a slow reference in exact rational arithmetic, on awkward weights."""

from fractions import Fraction

import pytest
import torch

from distribute.numerics import int4, int8
from distribute.numerics.codec import Ranges

CODECS = {**int8.CODECS, **int4.CODECS}
SYMMETRIC = [key for key in CODECS if not key.endswith("asymmetric")]
ASYMMETRIC = [key for key in CODECS if key.endswith("asymmetric")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def awkward(dtype: torch.dtype, rows: int = 8, width: int = 256) -> torch.Tensor:
    """Outliers, a zero row, zero groups, signed zeros, a subnormal row, one sign only."""
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(3)) * 0.1
    weight[1] = 0.0
    weight[2, :128] = -0.0
    weight[3] *= torch.finfo(dtype).tiny
    weight[4, 5] = 1000.0
    weight[5] = weight[5].abs()
    weight[6] = -weight[6].abs()
    return weight.to(dtype)


def coded(key: str, rows: torch.Tensor, **given: object) -> dict[str, torch.Tensor]:
    values = CODECS[key].weight_values(rows.abs().max().float(), tuple(rows.shape), rows.dtype)
    return values | CODECS[key].encode(rows, values, **given)


def steps(key: str, stored: dict[str, torch.Tensor], width: int) -> torch.Tensor:
    """fp32 [n, in]: the scale of each element."""
    scale = stored["weight_scale"].float().reshape(stored["weight_scale"].shape[0], -1)
    return scale.repeat_interleave(width // scale.shape[1], dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", CODECS)
def test_every_value_is_within_half_a_step_but_for_what_roundings_to_the_dtype_add(
    key: str, dtype: torch.dtype
) -> None:
    rows, subnormal = awkward(dtype), 3
    stored = coded(key, rows)
    error = (CODECS[key].decode(stored, 256) - rows.float()).abs() / steps(key, stored, 256)
    limit = 0.5 + 1e-5
    if "compressed-tensors" in key:
        most = 128 if "int8" in key else 16
        limit += 2 * most * torch.finfo(dtype).eps + 0.5 * key.endswith("asymmetric")  # a zero point is rounded too
        error[subnormal] = 0.0  # its scales have few bits
    assert error.max() <= limit
    assert stored["weight_scale"].isfinite().all()
    assert (stored["weight_scale"] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", [key for key in CODECS if "modelopt" in key])
def test_codes_of_modelopt_are_the_nearest_in_exact_arithmetic(key: str, dtype: torch.dtype) -> None:
    rows = awkward(dtype)
    stored = coded(key, rows)
    values, step = CODECS[key].decode(stored, 256), steps(key, stored, 256)
    for value, x, s in zip(values.flatten()[::7], rows.flatten()[::7], step.flatten()[::7], strict=True):
        quotient = Fraction(float(x)) / Fraction(float(s))
        code = round(Fraction(float(value)) / Fraction(float(s)))
        assert abs(quotient - code) <= Fraction(1, 2) + Fraction(1, 1 << 20)


@pytest.mark.parametrize("key", CODECS)
def test_a_piece_of_rows_gives_the_bytes_of_the_whole(key: str) -> None:
    rows, codec = awkward(torch.bfloat16, rows=24), CODECS[key]
    whole = coded(key, rows)
    for start in range(0, 24, codec.rows_together * max(1, 8 // codec.rows_together)):
        piece = codec.encode(rows[start : start + 8], {})
        for suffix, tensor in piece.items():
            per = 24 // whole[suffix].shape[0]
            assert torch.equal(tensor, whole[suffix][start // per : (start + 8) // per]), suffix


@pytest.mark.parametrize("key", CODECS)
def test_zeros_stay_zeros_with_scales_above_zero(key: str) -> None:
    stored = coded(key, torch.zeros(8, 256, dtype=torch.bfloat16))
    assert not CODECS[key].decode(stored, 256).any()
    assert (stored["weight_scale"] > 0).all()


@pytest.mark.parametrize("key", CODECS)
def test_given_codes_and_ranges_are_stored(key: str) -> None:
    codec, rows = CODECS[key], awkward(torch.bfloat16)
    least, most = (-128, 127) if "int8" in key else (-8, 7)
    codes = torch.randint(least, most + 1, rows.shape, dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    groups = 1 if "int8" in key else 256 // codec.group_size
    ranges = Ranges(torch.full((8, groups), -2.0), torch.full((8, groups), 1.0))
    grid = codec.grid(ranges, rows.dtype)
    expected = torch.cat([grid.values(part, group) for group, part in enumerate(codes.chunk(groups, dim=1))], dim=1)
    assert torch.equal(codec.decode(coded(key, rows, ranges=ranges, codes=codes), 256), expected)


@pytest.mark.parametrize("key", ASYMMETRIC)
def test_zero_points_use_all_codes_of_a_range_with_one_sign(key: str) -> None:
    rows = awkward(torch.float32)[5:6].repeat(8, 1)
    stored = coded(key, rows)
    twin = coded(key.removesuffix(".asymmetric"), rows)
    error = (CODECS[key].decode(stored, 256) - rows).square().mean()
    assert error < 0.4 * (CODECS[key.removesuffix(".asymmetric")].decode(twin, 256) - rows).square().mean()


@pytest.mark.parametrize("key", [key for key in CODECS if "int4" in key])
def test_rows_that_are_no_whole_groups_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="whole groups"):
        CODECS[key].encode(torch.zeros(8, 250, dtype=torch.bfloat16), {})


@pytest.mark.parametrize(("absmax", "scale"), [(0.0, 1.0), (127.0, 1.0), (2.54, 0.02)])
def test_the_input_scale_is_a_127th_and_one_for_inputs_that_never_moved(absmax: float, scale: float) -> None:
    found = int8.modelopt_input_values(torch.tensor(absmax), torch.bfloat16)["input_scale"]
    assert (found.dtype, found.dim()) == (torch.float32, 0)
    assert found.item() == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_range_wider_than_its_dtype_has_finite_scales(dtype: torch.dtype) -> None:
    rows = torch.zeros(8, 64, dtype=dtype)
    rows[:, 0], rows[:, 1] = torch.finfo(dtype).max * 0.9, -torch.finfo(dtype).max * 0.9
    codec = int4.CODECS["int4.compressed-tensors.64.asymmetric"]
    values = codec.weight_values(rows.abs().max().float(), (8, 64), dtype)
    stored = codec.encode(rows, values)
    assert stored["weight_scale"].isfinite().all() and (stored["weight_scale"] > 0).all()
    found = codec.decode(stored | values, 64)
    assert torch.all((found / torch.finfo(dtype).max - rows.float() / torch.finfo(dtype).max).abs() < 0.1)
