"""What every format promises, whatever its arithmetic: any split of the rows, finite scales, honest shapes."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.numerics import fp8_block, fp8_codec, mx, nvfp4_codec
from distribute.numerics.codec import Codec
from tests.distribute.numerics.samples import DTYPES, absmax, raw, weight

#: Every codec by name.
CODECS: dict[str, Codec] = {**fp8_codec.CODECS, **fp8_block.CODECS, **mx.CODECS, **nvfp4_codec.CODECS}
EACH_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: Of a weight: two whole blocks of rows and a part of one.
ROWS = 300


def values_of(codec: Codec, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return codec.weight_values(absmax(rows), (rows.shape[0], rows.shape[1]), rows.dtype)


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        suffix: torch.cat(
            [part[suffix].view(torch.uint8) if part[suffix].itemsize == 1 else part[suffix] for part in parts]
        )
        for suffix in parts[0]
    }


@EACH_CODEC
@EACH_DTYPE
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_split_of_the_rows_gives_the_bytes_of_the_whole(codec: Codec, dtype: torch.dtype, data) -> None:
    rows = weight(dtype, ROWS)
    values = values_of(codec, rows)
    whole = codec.encode(rows, values)
    steps = st.sets(st.integers(1, (ROWS - 1) // codec.rows_together), max_size=4)
    cuts = [0, *(codec.rows_together * step for step in sorted(data.draw(steps))), ROWS]
    parts = joined([codec.encode(rows[a:b], values) for a, b in itertools.pairwise(cuts)])
    assert parts.keys() == whole.keys()
    for suffix, tensor in whole.items():
        assert torch.equal(raw(parts[suffix]), raw(tensor)), suffix


@EACH_CODEC
@EACH_DTYPE
@pytest.mark.parametrize("kind", ["awkward", "zero", "one row"])
def test_scales_are_finite_and_positive_and_every_code_is_a_number(
    codec: Codec, dtype: torch.dtype, kind: str
) -> None:
    rows = {"awkward": weight(dtype), "zero": torch.zeros(5, 64, dtype=dtype), "one row": weight(dtype, 1)}[kind]
    values = values_of(codec, rows)
    stored = codec.encode(rows, values) | values
    for suffix, tensor in stored.items():
        if "scale" in suffix and tensor.dtype == torch.uint8:
            assert torch.all(tensor < 255), suffix
        elif "scale" in suffix:
            assert torch.all(tensor.float().isfinite() & (tensor.float() > 0)), suffix
    decoded = codec.decode(stored, rows.shape[1])
    assert decoded.dtype == torch.float32
    assert decoded.shape == rows.shape
    assert torch.all(decoded.isfinite())
    assert kind != "zero" or not decoded.any()


@EACH_CODEC
@EACH_DTYPE
def test_decoding_restores_a_weight_within_the_steps_of_its_codes(codec: Codec, dtype: torch.dtype) -> None:
    rows = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    values = values_of(codec, rows)
    decoded = codec.decode(codec.encode(rows, values) | values, 256)
    four_bits = any(t.dtype == torch.uint8 and s != "weight_scale" for s, t in codec.encode(rows, values).items())
    error = (decoded - rows.float()).norm() / rows.float().norm()
    assert error < (0.16 if four_bits else 0.035)


@EACH_CODEC
def test_only_the_last_piece_may_be_cut_short_and_nothing_gives_nothing(codec: Codec) -> None:
    rows = weight(torch.bfloat16)
    values = values_of(codec, rows)
    stored = codec.encode(rows[:0], values)
    assert all(tensor.shape[0] == 0 or suffix in values for suffix, tensor in stored.items())
    assert codec.decode(stored | values, 256).shape == (0, 256)


@EACH_CODEC
@EACH_DTYPE
def test_encoding_leaves_the_weight_as_it_was_and_takes_any_strides(codec: Codec, dtype: torch.dtype) -> None:
    rows = weight(dtype, 128, 128)
    before, values = rows.clone(), values_of(codec, rows)
    straight = codec.encode(rows.T.contiguous(), values)
    for suffix, tensor in codec.encode(rows.T, values).items():
        assert torch.equal(raw(tensor), raw(straight[suffix])), suffix
    assert torch.equal(raw(rows), raw(before))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EACH_CODEC
@EACH_DTYPE
def test_a_gpu_writes_the_bytes_of_a_cpu(codec: Codec, dtype: torch.dtype) -> None:
    rows = weight(dtype, ROWS)
    values = values_of(codec, rows)
    there = values_of(codec, rows.cuda())
    for suffix, tensor in (codec.encode(rows, values) | values).items():
        on_gpu = (codec.encode(rows.cuda(), there) | there)[suffix]
        assert torch.equal(raw(on_gpu.cpu()), raw(tensor)), suffix
