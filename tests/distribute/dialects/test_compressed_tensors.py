"""The compressed-tensors dialect against what compressed-tensors' own compressor made."""

import pytest
import torch

from distribute.dialects import compressed_tensors
from distribute.dialects.spec import PRODUCER, ShareGroups, implied_modules
from distribute.numerics.fp8 import CODECS
from distribute.numerics.observers import rows_absmax
from distribute.recipe import PRESETS
from distribute.tensors import DTYPES
from tests.golden import CASES, raw, read_golden

EACH_CASE = pytest.mark.parametrize("case", CASES)
EACH_PRESET = pytest.mark.parametrize("preset", PRESETS)


@EACH_CASE
@EACH_PRESET
def test_every_tensor_equals_the_reference_byte_for_byte(case: str, preset: str) -> None:
    source = read_golden(case, "source/model.safetensors")
    golden = read_golden(case, f"compressed-tensors-{preset}/tensors.safetensors")
    inputs = read_golden(case, f"compressed-tensors-{preset}/input_absmax.json") if preset == "fp8" else {}
    scheme = PRESETS[preset]
    codec = CODECS[compressed_tensors.codec(scheme)]
    written = {}
    for module in sorted({name.rpartition(".")[0] for name in golden}):
        weight = source[f"{module}.weight"]
        scale = codec.weight_scale(rows_absmax(weight), weight.dtype)
        written |= {f"{module}.weight": codec.encode(weight, scale), f"{module}.weight_scale": scale}
        if module in inputs:
            absmax = torch.tensor(inputs[module], dtype=weight.dtype).float()
            written[f"{module}.input_scale"] = codec.input_scale(absmax, weight.dtype)
        out, inp = weight.shape
        for spec in compressed_tensors.tensors((out, inp), scheme, "BF16"):
            tensor = written[f"{module}.{spec.suffix}"]
            assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[spec.dtype], spec.shape)
    assert written.keys() == golden.keys()
    for name, tensor in written.items():
        assert raw(tensor) == raw(golden[name]), name


@EACH_CASE
@EACH_PRESET
def test_the_config_block_equals_the_reference(case: str, preset: str) -> None:
    golden = read_golden(case, f"compressed-tensors-{preset}/quantization_config.json")
    source = read_golden(case, "source/model.safetensors")
    linear = {name.removesuffix(".weight") for name, tensor in source.items() if tensor.ndim == 2}
    quantized = {name for name in linear if name.endswith("_proj") or ".experts." in name}
    kept = linear - quantized - {"model.embed_tokens"}
    kept |= implied_modules(source)
    block = compressed_tensors.quantization_config(
        quantized, kept, PRESETS[preset], embeddings=["model.embed_tokens"]
    )
    golden["ignore"] = sorted(golden["ignore"])
    added = {"version": "0.20.1", "sparsity_config": {}, "transform_config": {}, "producer": PRODUCER}
    assert block == golden | added
    assert compressed_tensors.extra_files(quantized, kept, PRESETS[preset]) == {}


def test_a_tied_head_is_ignored_although_it_is_not_stored() -> None:
    assert implied_modules(["model.embed_tokens.weight"]) == {"lm_head"}
    assert implied_modules(["model.embed_tokens.weight", "lm_head.weight"]) == frozenset()
    assert implied_modules(["language_model.lm_head.weight"]) == frozenset()


def test_an_expert_without_tokens_falls_back_on_its_siblings_of_the_same_stage() -> None:
    block = "model.layers.3.block_sparse_moe.experts"
    modules = [f"{block}.{i}.{leaf}" for i in (0, 1) for leaf in ("w1", "w2", "w3")]
    found = compressed_tensors.share_groups(modules, PRESETS["fp8"])
    assert (found.weight, found.input) == ((), ())
    assert set(found.input_fallback) == {
        tuple(f"{block}.{i}.{leaf}" for i in (0, 1) for leaf in ("w1", "w3")),
        (f"{block}.0.w2", f"{block}.1.w2"),
    }
    assert compressed_tensors.share_groups(modules, PRESETS["fp8_dynamic"]) == ShareGroups()
