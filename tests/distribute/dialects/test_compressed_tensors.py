"""The compressed-tensors dialect against what compressed-tensors' own compressor made."""

import pytest

from distribute.dialects import compressed_tensors
from distribute.dialects.spec import PRODUCER, ShareGroups, implied_modules
from distribute.scheme import PRESETS
from tests.golden import CASES, read_golden

EACH_CASE = pytest.mark.parametrize("case", CASES)
EACH_PRESET = pytest.mark.parametrize("preset", ["fp8", "fp8_dynamic"])
SCHEMES = {name: preset.for_dialect("compressed-tensors") for name, preset in PRESETS.items()}


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
        dict.fromkeys(quantized, SCHEMES[preset]), kept, embeddings=["model.embed_tokens"]
    )
    golden["ignore"] = sorted(golden["ignore"])
    added = {"version": "0.20.1", "sparsity_config": {}, "transform_config": {}, "producer": PRODUCER}
    assert block == golden | added
    assert compressed_tensors.extra_files(dict.fromkeys(quantized, SCHEMES[preset]), kept) == {}


def test_a_tied_head_is_ignored_although_it_is_not_stored() -> None:
    assert implied_modules(["model.embed_tokens.weight"]) == {"lm_head"}
    assert implied_modules(["model.embed_tokens.weight", "lm_head.weight"]) == frozenset()
    assert implied_modules(["language_model.lm_head.weight"]) == frozenset()


def test_an_expert_without_tokens_falls_back_on_its_siblings_of_the_same_stage() -> None:
    block = "model.layers.3.block_sparse_moe.experts"
    modules = [f"{block}.{i}.{leaf}" for i in (0, 1) for leaf in ("w1", "w2", "w3")]
    found = compressed_tensors.share_groups(dict.fromkeys(modules, SCHEMES["fp8"]))
    assert (found.weight, found.input) == ((), ())
    assert set(found.input_fallback) == {
        tuple(f"{block}.{i}.{leaf}" for i in (0, 1) for leaf in ("w1", "w3")),
        (f"{block}.0.w2", f"{block}.1.w2"),
    }
    assert compressed_tensors.share_groups(dict.fromkeys(modules, SCHEMES["fp8_dynamic"])) == ShareGroups()
