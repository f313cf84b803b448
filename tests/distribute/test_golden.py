"""The stages against the reference exporters: every tensor's dtype, shape and bytes, and the JSON files.

The goldens were written by nvidia-modelopt 0.47.0 and compressed-tensors 0.20.1 (tests/oracle/make_goldens.py)
from the same sources and the same calibration batch.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distribute.layerwise import LayerwiseModel
from distribute.observe import observe
from distribute.scheme import PRESETS
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from tests.exports import make_checkpoint, plan_of, read_tensors, weight_absmax
from tests.golden import GOLDEN, raw, read_golden

#: What a golden folder's name says beyond a preset.
RECIPES: dict[str, dict[str, Any]] = {
    "int4-32": {"preset": "int4", "group_size": 32},
    "int4_asymmetric": {"preset": "int4", "symmetric": False},
    "int4_asymmetric-32": {"preset": "int4", "symmetric": False, "group_size": 32},
    "fp8-kv_fp8": {"preset": "fp8", "kv_cache": "fp8"},
    "nvfp4-kv_nvfp4": {"preset": "nvfp4", "kv_cache": "nvfp4"},
    "mixed": {"preset": "fp8", "overrides": {"*down_proj": "mxfp8", "*mlp*": "nvfp4"}},
}
#: What the reference searches for: tests/distribute/test_golden_search.py.
SEARCHED = {"int8_smoothquant", "int4_awq", "w4a8"}
#: Presets that no reference makes on a CPU, and why.
WITHOUT_REFERENCE = {
    "modelopt": {
        "int4_gptq": "nvidia-modelopt has no GPTQ export",
        "nvfp4_awq": "its NVFP4 search needs a GPU",
    },
    "compressed-tensors": {
        "int8_smoothquant": "the compressor is that of int8",
        "int4_awq": "the compressor is that of int4",
        "int4_gptq": "the compressor is that of int4",
        "nvfp4_awq": "the compressor is that of nvfp4",
    },
}
FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def _goldens(dialect: str) -> list[tuple[str, str]]:
    """(case, name) of every golden folder of a dialect."""
    folders = sorted(GOLDEN.glob(f"*/{dialect}-*"))
    return [(folder.parent.name, folder.name.removeprefix(f"{dialect}-")) for folder in folders]


def _recipe(name: str, dialect: str) -> dict[str, Any]:
    return {"dialect": dialect, **RECIPES.get(name, {"preset": name})}


def _observed(case: str, recipe: dict[str, Any]) -> Statistics:
    """What our own calibration measures on the golden batch."""
    source = GOLDEN / case / "source"
    plan = plan_of(source, recipe)
    batch = torch.tensor(read_golden(case, "calibration.json")["input_ids"])
    kv = "kv_cache" in recipe
    found = observe(LayerwiseModel.open(Checkpoint.open(source)), [batch], plan.quantized, kv=kv)
    return Statistics(weight_absmax(source, plan), found.input_absmax, {"warnings": []}, kv_absmax=found.kv_absmax)


def _given(case: str, recipe: dict[str, Any], golden: Path) -> Statistics:
    """The ranges that the compressor was given, which are bf16: it has no calibration of its own."""
    source = GOLDEN / case / "source"
    inputs, kv = (_bf16_values(golden / name) for name in ("input_absmax.json", "kv_absmax.json"))
    return Statistics(
        weight_absmax(source, plan_of(source, recipe)),
        inputs,
        {"warnings": []},
        kv_absmax={module: (value, 2 * value) for module, value in kv.items()},
    )


def _bf16_values(path: Path) -> dict[str, torch.Tensor]:
    values = json.loads(path.read_text()) if path.exists() else {}
    return {module: torch.tensor(value).bfloat16().float() for module, value in values.items()}


def _differences(written: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[str]:
    common = sorted(written.keys() & reference.keys())
    return [
        *(f"only on one side: {n}" for n in sorted(written.keys() ^ reference.keys())),
        *(f"dtype or shape: {n}" for n in common if raw(written[n])[:2] != raw(reference[n])[:2]),
        *(f"bytes: {n}" for n in common if raw(written[n])[2] != raw(reference[n])[2]),
    ]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_every_preset_has_a_golden_or_a_reason(dialect: str) -> None:
    covered = {_recipe(name, dialect)["preset"] for _, name in _goldens(dialect)}
    excused = WITHOUT_REFERENCE[dialect].keys() | {n for n, preset in PRESETS.items() if dialect in preset.refused}
    assert covered | excused == set(PRESETS)
    assert not covered & excused


@pytest.mark.parametrize(("case", "name"), [g for g in _goldens("modelopt") if g[1] not in SEARCHED])
def test_modelopt_checkpoints_equal_the_reference(tmp_path: Path, case: str, name: str) -> None:
    recipe = _recipe(name, "modelopt")
    written = make_checkpoint(GOLDEN / case / "source", tmp_path, recipe, _observed(case, recipe))
    golden = f"modelopt-{name}"
    reference = read_golden(case, f"{golden}/model.safetensors")
    reference = _with_block_axes(reference) if name == "fp8_block" else _without_nan(reference)
    assert _differences(read_tensors(written), reference) == []
    theirs = [read_golden(case, f"{golden}/{file}") for file in ("config.json", "hf_quant_config.json")]
    _speak_as_0_48(theirs[0]["quantization_config"], theirs[1]["quantization"])
    ours = [json.loads((written / file).read_text()) for file in ("config.json", "hf_quant_config.json")]
    assert list(map(_comparable, ours)) == list(map(_comparable, theirs))


def _with_block_axes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference drops all axes of the scale of a single block; loaders want four, which we always write."""
    one = {name for name, tensor in tensors.items() if name.endswith("_scale") and not tensor.dim()}
    assert one, "no weight of one block is left to show the difference"
    return {name: tensor.reshape(1, 1, 1, 1) if name in one else tensor for name, tensor in tensors.items()}


def _without_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference divides by zero where a whole weight is zero; we write scales of 1.0 and codes of zero there."""
    tensors = dict(tensors)
    scales = [name for name in tensors if name.rpartition(".")[2] in ("weight_scale", "weight_scale_2")]
    bad = {
        name.rpartition(".")[0] for name in scales if tensors[name].dtype == torch.float32 and not tensors[name].any()
    }
    for name in (name for name in tensors if name.rpartition(".")[0] in bad):
        if name in scales:
            tensors[name] = torch.ones_like(tensors[name], dtype=torch.float32).to(tensors[name].dtype)
        elif name.endswith(".weight"):
            assert set(tensors[name].view(torch.uint8).unique().tolist()) <= {0x77, 0xFF}
            tensors[name] = torch.zeros_like(tensors[name])
    return tensors


@pytest.mark.parametrize("preset", ["fp8", "nvfp4"])
def test_the_reference_itself_writes_nan_for_a_weight_that_is_zero(preset: str) -> None:
    reference = read_golden("zeros", f"modelopt-{preset}/model.safetensors")
    differing = {line.partition(": ")[2] for line in _differences(_without_nan(reference), reference)}
    module = "model.layers.0.mlp.down_proj"
    assert {f"{module}.weight", f"{module}.weight_scale"} < differing


def _speak_as_0_48(block: dict[str, Any], separate: dict[str, Any]) -> None:
    """In place: what 0.47 leaves out or writes in small letters, and loaders of today need."""
    algo = separate["quant_algo"]
    if algo == "MIXED_PRECISION":
        separate["exclude_modules"] = block["ignore"] = ["lm_head", "model.embed_tokens"]
        for group in block["config_groups"].values():
            group |= _mx_group(8) if all(target.endswith("down_proj") for target in group["targets"]) else {}
    if algo == "fp8_pb_wo":
        separate |= {"quant_algo": "FP8_PB_WO", "group_size": 128}
        weights = {"strategy": "block", "block_structure": [128, 128]}
        block["config_groups"] = {"group_0": {"weights": FLOAT8 | weights, "targets": ["Linear"]}}
    if algo in ("mxfp4", "MXFP8"):
        separate |= {"quant_algo": algo.upper(), "group_size": 32}
        block["config_groups"] = {"group_0": _mx_group(4 if algo == "mxfp4" else 8) | {"targets": ["Linear"]}}
    block["quant_algo"] = separate["quant_algo"]
    if size := separate.get("group_size"):
        block["group_size"] = size


def _mx_group(bits: int) -> dict[str, Any]:
    weights = FLOAT8 | {"num_bits": bits, "group_size": 32, "strategy": "group"}
    return {"weights": weights, "input_activations": weights | {"dynamic": True}}


def _comparable(value: dict[str, Any]) -> dict[str, Any]:
    """Without the producer; the groups of a mixed checkpoint by what they apply to, since their numbers say nothing."""
    value.pop("producer", None)
    block = value.get("quantization_config", {})
    block.pop("producer", None)
    groups = block.get("config_groups", {})
    if len(groups) > 1:
        block["config_groups"] = {" ".join(group["targets"]): group for group in groups.values()}
    return value


@pytest.mark.parametrize(("case", "name"), _goldens("compressed-tensors"))
def test_compressed_tensors_layers_equal_the_reference(tmp_path: Path, case: str, name: str) -> None:
    recipe = _recipe(name, "compressed-tensors")
    golden = GOLDEN / case / f"compressed-tensors-{name}"
    folder = make_checkpoint(GOLDEN / case / "source", tmp_path, recipe, _given(case, recipe, golden))
    written, source, reference = read_tensors(folder), read_tensors(GOLDEN / case / "source"), read_tensors(golden)
    assert reference
    modules = {name.rpartition(".")[0] for name in reference}
    kept = {name: tensor for name, tensor in source.items() if name.rpartition(".")[0] not in modules}
    biases = {name: tensor for name, tensor in source.items() if name.endswith(".bias")}
    if PRESETS[recipe["preset"]].scheme.weights.granularity == "tensor":
        reference = _with_unit_scales(reference, source)
    assert _differences(written, kept | biases | reference) == []
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    expected = json.loads((golden / "quantization_config.json").read_text())
    added = {"version": "0.20.1", "sparsity_config": {}, "transform_config": {}}
    block.pop("producer")
    assert block == expected | added | {"ignore": sorted(expected["ignore"])}


def _with_unit_scales(reference: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Where one scale is for all, the reference gives a weight of zeros the machine epsilon; we write 1.0."""
    zero = {f"{name}_scale" for name, tensor in source.items() if not tensor.any()}
    return {
        name: torch.ones_like(tensor) if name in zero and tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in reference.items()
    }
