"""FP8 per tensor and per channel by the common protocol: the bytes of `fp8.py`, whatever rows are coded together."""

import pytest
import torch

from distribute.numerics import fp8
from distribute.numerics.codec import Ranges
from distribute.numerics.fp8_codec import ABSMAX, CODECS, Fp8Codec
from distribute.numerics.observers import rows_absmax
from tests.distribute.numerics.samples import DTYPES, absmax, raw, weight

EACH_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
PER_CHANNEL = pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec.rules.per_row])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def encoded(codec: Fp8Codec, rows: torch.Tensor, ranges: Ranges | None = None) -> dict[str, torch.Tensor]:
    values = codec.weight_values(absmax(rows), (rows.shape[0], rows.shape[1]), rows.dtype)
    return values | codec.encode(rows, values, ranges=ranges)


@EACH_CODEC
@EACH_DTYPE
def test_codes_and_scales_are_those_of_the_whole_weight_at_once(codec: Fp8Codec, dtype: torch.dtype) -> None:
    rows = weight(dtype)
    scale = codec.rules.weight_scale(rows_absmax(rows), dtype)
    stored = encoded(codec, rows)
    assert torch.equal(stored["weight_scale"], scale)
    assert stored["weight_scale"].shape == scale.shape
    assert torch.equal(raw(stored["weight"]), raw(codec.rules.encode(rows, scale)))


@EACH_CODEC
def test_only_a_scale_of_a_whole_weight_is_stored_with_the_plan(codec: Fp8Codec) -> None:
    names = codec.weight_values(torch.tensor(1.0), (4, 4), torch.bfloat16).keys()
    assert names == ({ABSMAX} if codec.rules.per_row else {"weight_scale"})
    assert ABSMAX.startswith("#")


@PER_CHANNEL
@EACH_DTYPE
def test_rows_of_zeros_know_whether_their_whole_weight_is_zero(name: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, 64, dtype=dtype)
    epsilon = torch.finfo(dtype).eps if "compressed" in name else 1.0
    for whole, expected in ((0.0, 1.0), (0.5, epsilon)):
        stored = CODECS[name].encode(zeros, {ABSMAX: torch.tensor(whole)})
        assert torch.all(stored["weight_scale"] == expected)
        assert not stored["weight"].view(torch.uint8).any()


@PER_CHANNEL
def test_ranges_stand_for_the_magnitudes_of_the_rows_and_what_is_beyond_saturates(name: str) -> None:
    rows = weight(torch.float32)
    magnitudes = rows.abs().amax(dim=1, keepdim=True)
    stored = encoded(CODECS[name], rows, Ranges(low=-magnitudes / 2, high=magnitudes / 4))
    usual = encoded(CODECS[name], rows)
    moved = magnitudes.flatten() > 1e-30  # modelopt lifts subnormal magnitudes
    assert torch.equal(stored["weight_scale"].flatten()[moved], usual["weight_scale"].flatten()[moved] / 2)
    assert stored["weight"].float().abs().amax(dim=1)[0] == fp8.E4M3_MAX
