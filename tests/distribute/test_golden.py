"""The stages against the reference exporters: every tensor's dtype, shape and bytes, and the JSON files.

The goldens were written by nvidia-modelopt 0.47.0 and compressed-tensors 0.20.1 (tests/oracle/make_goldens.py)
from the same sources and the same calibration batch.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distribute import export, quantize
from distribute.job import Job, Progress
from distribute.layerwise import LayerwiseModel
from distribute.numerics.observers import rows_absmax
from distribute.observe import observe
from distribute.plan import make_plan
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from distribute.tensors import read_tensor, to_bytes

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = ("llama", "qwen3", "qwen2", "mixtral")


def _export(case: str, folder: Path, **recipe: str) -> Path:
    """The checkpoint that our stages make of a golden source and its calibration batch."""
    source = GOLDEN / case / "source"
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, make_recipe(dict(recipe)), 1 << 30)
    inputs = _given_inputs(case) if recipe["dialect"] == "compressed-tensors" else _observed(case, plan.quantized)
    weights = {f"{m}.weight": rows_absmax(read_tensor(checkpoint, f"{m}.weight")) for m in plan.quantized}
    Statistics(weights, inputs, {"warnings": []}).write(folder)
    common = {
        "source": str(source),
        "folder": str(folder),
        "recipe": make_recipe(dict(recipe)).model_dump(mode="json"),
    }
    ranks, progress = Ranks.start(), Progress(folder, 0)
    decide = Job(
        "quantize",
        **common,
        inputs={"calibration": str(folder)},
        options={"max_shard_bytes": 1 << 30, "fail_on_unrouted_experts": False},
    )
    quantize.run(decide, ranks, progress)
    export.run(Job("export", **common, inputs={"plan": str(folder)}), ranks, progress)
    return folder / "checkpoint"


def _observed(case: str, quantized: list[str]) -> dict[str, torch.Tensor]:
    batch = torch.tensor(json.loads((GOLDEN / case / "calibration.json").read_text())["input_ids"])
    return observe(LayerwiseModel.open(Checkpoint.open(GOLDEN / case / "source")), [batch], quantized).input_absmax


def _given_inputs(case: str) -> dict[str, torch.Tensor]:
    """The input ranges that the compressor was given: it has no calibration of its own."""
    given = json.loads((GOLDEN / case / "compressed-tensors-fp8" / "input_absmax.json").read_text())
    return {module: torch.tensor(value).bfloat16().float() for module, value in given.items()}  # activations are bf16


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _differences(written: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[str]:
    names = written.keys() ^ reference.keys()
    common = written.keys() & reference.keys()
    kinds = [n for n in common if (written[n].dtype, written[n].shape) != (reference[n].dtype, reference[n].shape)]
    data = [n for n in common if bytes(to_bytes(written[n])) != bytes(to_bytes(reference[n]))]
    return [
        *(f"only on one side: {n}" for n in names),
        *(f"dtype or shape: {n}" for n in kinds),
        *(f"bytes: {n}" for n in data),
    ]


def _without_producer(path: Path) -> Any:
    value = json.loads(path.read_text())
    value.pop("producer", None)
    value.get("quantization_config", {}).pop("producer", None)
    return value


@pytest.mark.parametrize("preset", ["fp8", "fp8_dynamic"])
@pytest.mark.parametrize("case", CASES)
def test_modelopt_checkpoints_equal_the_reference(tmp_path: Path, case: str, preset: str) -> None:
    written = _export(case, tmp_path, dialect="modelopt", preset=preset)
    reference = GOLDEN / case / f"modelopt-{preset}"
    assert _differences(_tensors(written), _tensors(reference)) == []
    for name in ("config.json", "hf_quant_config.json"):
        assert _without_producer(written / name) == _without_producer(reference / name)


@pytest.mark.parametrize("preset", ["fp8", "fp8_dynamic"])
@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_layers_equal_the_reference(tmp_path: Path, case: str, preset: str) -> None:
    written = _tensors(_export(case, tmp_path, dialect="compressed-tensors", preset=preset))
    reference = _tensors(GOLDEN / case / f"compressed-tensors-{preset}")
    assert reference
    assert _differences({n: t for n, t in written.items() if n in reference}, reference) == []
    source = _tensors(GOLDEN / case / "source")
    assert (
        _differences(
            {n: t for n, t in written.items() if n not in reference},
            {n: t for n, t in source.items() if n not in reference},
        )
        == []
    )
