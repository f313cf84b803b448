"""The modelopt dialect against what nvidia-modelopt wrote."""

import json

import pytest
import torch

from distribute.dialects import modelopt
from distribute.dialects.spec import PRODUCER, ShareGroups, implied_modules
from distribute.numerics.fp8 import CODECS
from distribute.numerics.observers import rows_absmax
from distribute.recipe import PRESETS
from distribute.tensors import DTYPES
from tests.golden import CASES, raw, read_golden

EACH_CASE = pytest.mark.parametrize("case", CASES)
EACH_PRESET = pytest.mark.parametrize("preset", PRESETS)
EMBEDDING = "model.embed_tokens"


def split(case: str) -> tuple[list[str], list[str]]:
    """(quantized, kept) linear layers and routers of a golden case, by names on disk."""
    source = read_golden(case, "source/model.safetensors")
    linear = [name.removesuffix(".weight") for name, tensor in source.items() if tensor.ndim == 2]
    quantized = [name for name in linear if name.endswith("_proj") or ".experts." in name]
    kept = set(linear) - set(quantized) - {EMBEDDING}
    return quantized, sorted(kept | implied_modules(source))


def shared_row_absmax(source: dict[str, torch.Tensor], quantized: list[str], preset: str) -> dict[str, torch.Tensor]:
    """Row absmax of every quantized weight; modules that share a weight scale have all the same."""
    found = {name: rows_absmax(source[f"{name}.weight"]) for name in quantized}
    for group in modelopt.share_groups(quantized, PRESETS[preset]).weight:
        largest = torch.stack([found[name].max() for name in group]).max().reshape(1)
        found |= dict.fromkeys(group, largest)
    return found


@EACH_CASE
@EACH_PRESET
def test_weights_and_their_scales_equal_the_reference_byte_for_byte(case: str, preset: str) -> None:
    source = read_golden(case, "source/model.safetensors")
    golden = read_golden(case, f"modelopt-{preset}/model.safetensors")
    quantized, _ = split(case)
    codec = CODECS[modelopt.codec(PRESETS[preset])]
    for name, absmax in shared_row_absmax(source, quantized, preset).items():
        weight = source[f"{name}.weight"]
        scale = codec.weight_scale(absmax, weight.dtype)
        assert raw(scale) == raw(golden[f"{name}.weight_scale"]), name
        assert raw(codec.encode(weight, scale)) == raw(golden[f"{name}.weight"]), name


@EACH_CASE
@EACH_PRESET
def test_names_dtypes_and_shapes_equal_the_reference(case: str, preset: str) -> None:
    source = read_golden(case, "source/model.safetensors")
    golden = read_golden(case, f"modelopt-{preset}/model.safetensors")
    quantized, _ = split(case)
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in source.items()}
    for module in quantized:
        out, inp = source[f"{module}.weight"].shape
        for spec in modelopt.tensors((out, inp), PRESETS[preset], "BF16"):
            expected[f"{module}.{spec.suffix}"] = (DTYPES[spec.dtype], spec.shape)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in golden.items()} == expected


@EACH_CASE
@EACH_PRESET
def test_input_scales_are_shared_as_in_the_reference(case: str, preset: str) -> None:
    golden = read_golden(case, f"modelopt-{preset}/model.safetensors")
    quantized, _ = split(case)
    groups = modelopt.share_groups(quantized, PRESETS[preset]).input
    assert bool(groups) == (case == "mixtral" and preset == "fp8")
    for group in groups:
        assert len({golden[f"{module}.input_scale"].item() for module in group}) == 1


@EACH_CASE
@EACH_PRESET
def test_both_json_files_equal_the_reference_apart_from_the_producer(case: str, preset: str) -> None:
    quantized, kept = split(case)
    arguments = (quantized, kept, PRESETS[preset])
    config = read_golden(case, f"modelopt-{preset}/config.json")["quantization_config"]
    separate = read_golden(case, f"modelopt-{preset}/hf_quant_config.json")
    config["producer"] = separate["producer"] = PRODUCER
    written = modelopt.quantization_config(*arguments, embeddings=[EMBEDDING])
    files = modelopt.extra_files(*arguments, embeddings=[EMBEDDING])
    assert json.dumps(written) == json.dumps(config)  # key order included
    assert json.dumps(files) == json.dumps({"hf_quant_config.json": separate})


def test_experts_share_by_block_and_by_expert() -> None:
    block = "model.layers.0.mlp.experts"
    modules = [f"{block}.{i}.{leaf}" for i in (0, 1) for leaf in ("gate_proj", "up_proj", "down_proj")]
    dense = ["model.layers.0.mlp.shared_expert.up_proj", "model.layers.0.self_attn.q_proj"]
    found = modelopt.share_groups([*dense, *modules], PRESETS["fp8"])
    assert found.weight == tuple((f"{block}.{i}.gate_proj", f"{block}.{i}.up_proj") for i in (0, 1))
    assert set(found.input) == {
        tuple(f"{block}.{i}.{leaf}" for i in (0, 1) for leaf in ("gate_proj", "up_proj")),
        tuple(f"{block}.{i}.down_proj" for i in (0, 1)),
    }
    assert found.input_fallback == ()
    assert modelopt.share_groups(modules, PRESETS["fp8_dynamic"]) == ShareGroups()
