"""Every dialect a recipe may name speaks for every preset."""

from typing import get_args

import pytest
import torch

from distribute.dialects.table import DIALECTS
from distribute.numerics.table import find_codec, input_values
from distribute.scheme import PRESETS, Dialect
from distribute.tensors import DTYPES


def test_every_dialect_of_the_recipe_is_in_the_table() -> None:
    assert set(DIALECTS) == set(get_args(Dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_codec_exists_and_stores_what_the_dialect_says(dialect: str, preset: str) -> None:
    if dialect in PRESETS[preset].refused:
        pytest.skip(PRESETS[preset].refused[dialect])
    scheme, shape = PRESETS[preset].for_dialect(dialect), (136, 256)
    codec = find_codec(DIALECTS[dialect].codec(scheme))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = codec.weight_values(weight.abs().max().float(), shape, torch.bfloat16)
    stored = codec.encode(weight, values) | {name: value for name, value in values.items() if "#" not in name}
    if scheme.inputs is not None and scheme.static_inputs:
        stored |= input_values(scheme.inputs.format, dialect, torch.tensor(3.0), torch.bfloat16)
    specs = DIALECTS[dialect].tensors(shape, scheme, "BF16")
    assert {spec.suffix: (DTYPES[spec.dtype], spec.shape) for spec in specs} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()
    }
    assert codec.rows_together == max(spec.per for spec in specs)
    error = codec.decode(stored, shape[1]) - weight.float()
    assert error.square().mean() < 0.05 * weight.float().square().mean()
