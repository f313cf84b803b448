"""The modelopt dialect against what nvidia-modelopt wrote."""

import json

import pytest

from distribute.dialects import modelopt
from distribute.dialects.spec import PRODUCER, ShareGroups, implied_modules
from distribute.scheme import PRESETS
from distribute.tensors import DTYPES
from tests.golden import CASES, read_golden

EACH_CASE = pytest.mark.parametrize("case", CASES)
EACH_PRESET = pytest.mark.parametrize("preset", ["fp8", "fp8_dynamic"])
SCHEMES = {name: preset.for_dialect("modelopt") for name, preset in PRESETS.items()}
EMBEDDING = "model.embed_tokens"


def split(case: str) -> tuple[list[str], list[str]]:
    """(quantized, kept) linear layers and routers of a golden case, by names on disk."""
    source = read_golden(case, "source/model.safetensors")
    linear = [name.removesuffix(".weight") for name, tensor in source.items() if tensor.ndim == 2]
    quantized = [name for name in linear if name.endswith("_proj") or ".experts." in name]
    kept = set(linear) - set(quantized) - {EMBEDDING}
    return quantized, sorted(kept | implied_modules(source))


@EACH_CASE
@EACH_PRESET
def test_names_dtypes_and_shapes_equal_the_reference(case: str, preset: str) -> None:
    source = read_golden(case, "source/model.safetensors")
    golden = read_golden(case, f"modelopt-{preset}/model.safetensors")
    quantized, _ = split(case)
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in source.items()}
    for module in quantized:
        out, inp = source[f"{module}.weight"].shape
        for spec in modelopt.tensors((out, inp), SCHEMES[preset], "BF16"):
            expected[f"{module}.{spec.suffix}"] = (DTYPES[spec.dtype], spec.shape)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in golden.items()} == expected


@EACH_CASE
@EACH_PRESET
def test_input_scales_are_shared_as_in_the_reference(case: str, preset: str) -> None:
    golden = read_golden(case, f"modelopt-{preset}/model.safetensors")
    quantized, _ = split(case)
    groups = modelopt.share_groups(dict.fromkeys(quantized, SCHEMES[preset])).input
    assert bool(groups) == (preset == "fp8")
    for group in groups:
        assert len({golden[f"{module}.input_scale"].item() for module in group}) == 1


@EACH_CASE
@EACH_PRESET
def test_both_json_files_equal_the_reference_apart_from_the_producer(case: str, preset: str) -> None:
    quantized, kept = split(case)
    arguments = (dict.fromkeys(quantized, SCHEMES[preset]), kept)
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
    found = modelopt.share_groups(dict.fromkeys([*dense, *modules], SCHEMES["fp8"]))
    pairs = tuple((f"{block}.{i}.gate_proj", f"{block}.{i}.up_proj") for i in (0, 1))
    assert found.weight == pairs
    assert found.input[: len(pairs)] == pairs
    assert set(found.input[len(pairs) :]) == {
        tuple(f"{block}.{i}.{leaf}" for i in (0, 1) for leaf in ("gate_proj", "up_proj")),
        tuple(f"{block}.{i}.down_proj" for i in (0, 1)),
    }
    assert found.input_fallback == ()
    assert modelopt.share_groups(dict.fromkeys(modules, SCHEMES["fp8_dynamic"])) == ShareGroups()


@pytest.mark.parametrize(
    ("preset", "weight", "inputs"),
    [
        ("fp8", False, True),  # engines take the largest of the weight scales
        ("fp8_block", False, False),
        ("int8", False, True),
        ("int4", False, False),
        ("w4a8", True, True),
        ("nvfp4", True, True),
        ("nvfp4_weight_only", True, False),
        ("mxfp4", False, False),
    ],
)
def test_layers_that_engines_fuse_share_scales_of_whole_weights_and_inputs(
    preset: str, weight: bool, inputs: bool
) -> None:
    leaves = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    modules = [f"model.layers.0.{leaf}" for leaf in (*leaves, "self_attn.o_proj", "mlp.down_proj")]
    groups = (tuple(modules[:3]), tuple(modules[3:5]))
    found = modelopt.share_groups(dict.fromkeys(modules, SCHEMES[preset]))
    assert found.weight == (groups if weight else ())
    assert found.input == (groups if inputs else ())
