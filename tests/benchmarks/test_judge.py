"""The judge reads what a checkpoint says of weights and inputs, whoever wrote it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.judge import CheckpointError, fake_quantizer, load_judged
from benchmarks.makers import Case
from distribute.dialects.table import DIALECTS
from distribute.numerics.observers import absmax
from distribute.numerics.table import find_codec
from tests.models import make_model

X = torch.tensor([[448.0, 1.04, -3.3, 0.0] * 32, [7.0, 0.1, -0.02, 1.0] * 32])


def inputs_of(preset: str, dialect: str = "compressed-tensors"):
    return Case("nogather", preset, dialect).scheme.inputs


def test_inputs_beyond_a_static_scale_saturate() -> None:
    fake = fake_quantizer(inputs_of("fp8"), {"input_scale": torch.tensor([0.5])})
    assert fake(X)[0, 0] == 224.0


@pytest.mark.parametrize("preset", ["fp8_dynamic", "int8", "mxfp8", "fp8_block"])
def test_a_token_does_not_change_with_its_neighbours(preset: str) -> None:
    fake = fake_quantizer(inputs_of(preset), {})
    assert torch.equal(fake(X)[1:], fake(X[1:]))
    assert (fake(X) - X).abs().max() <= X.abs().max() / 16


def test_a_last_group_may_be_smaller() -> None:
    fake = fake_quantizer(inputs_of("fp8_block"), {})
    assert fake(X[:, :70]).shape == (2, 70)
    assert torch.equal(fake(X.repeat(1, 2)[:, :200])[:, :128], fake(X))


def test_a_multiplier_and_its_reciprocal_are_one_scale() -> None:
    scale = torch.tensor(2.0**-6)
    ours = fake_quantizer(inputs_of("nvfp4", "modelopt"), {"input_scale": scale})
    other = fake_quantizer(inputs_of("nvfp4"), {"input_global_scale": 1 / scale.reshape(1)})
    assert torch.equal(ours(X), other(X))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_checkpoint_is_its_decoded_weights_and_its_own_norms(tmp_path: Path, dialect: str) -> None:
    source = make_model("llama", tmp_path / "source")
    stored, scheme = write_checkpoint(source, tmp_path / "out", dialect)
    model = load_judged(source, tmp_path / "out", scheme, dialect)
    name = "model.layers.0.mlp.up_proj"
    own = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(name)}
    decoded = find_codec(DIALECTS[dialect].codec(scheme)).decode(own, model.get_submodule(name).in_features)
    assert torch.equal(model.get_submodule(name).weight, decoded.to(model.dtype))
    assert torch.equal(model.model.layers[0].input_layernorm.weight, stored["model.layers.0.input_layernorm.weight"])


def test_a_checkpoint_without_a_weight_is_refused(tmp_path: Path) -> None:
    source = make_model("llama", tmp_path / "source")
    stored, scheme = write_checkpoint(source, tmp_path / "out", "modelopt")
    kept = {name: value for name, value in stored.items() if "layers.0.mlp.up_proj" not in name}
    save_file(kept, tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no weight of model\.layers\.0\.mlp\.up_proj"):
        load_judged(source, tmp_path / "out", scheme, "modelopt")


def write_checkpoint(source: Path, out: Path, dialect: str):
    """Every linear layer in fp8, and norms that are twice those of the source."""
    scheme = Case("nogather", "fp8_dynamic", dialect).scheme
    codec = find_codec(DIALECTS[dialect].codec(scheme))
    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            values = codec.weight_values(absmax(value), (value.shape[0], value.shape[1]), value.dtype)
            coded = codec.encode(value, values)
            stored |= {f"{name.removesuffix('weight')}{suffix}": tensor for suffix, tensor in coded.items()}
        else:
            stored[name] = value * 2 if "norm" in name else value
    out.mkdir()
    save_file({name: value.contiguous() for name, value in stored.items()}, out / "model.safetensors")
    return stored, scheme
