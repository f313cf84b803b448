"""What the quantize and export stages make of a source and given statistics, in this process."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from distribute import export, quantize
from distribute.checks import check_folder
from distribute.job import Job, Progress
from distribute.numerics.observers import rows_absmax
from distribute.plan import Plan, make_plan
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from distribute.tensors import read_tensor

ONE_SHARD = 1 << 30


def plan_of(source: Path, recipe: dict[str, Any]) -> Plan:
    """What is planned for a source."""
    return make_plan(Checkpoint.open(source), make_recipe(recipe), ONE_SHARD)


def weight_absmax(source: Path, plan: Plan) -> dict[str, torch.Tensor]:
    """fp32 0-dim of every weight that is to be quantized, by module."""
    checkpoint = Checkpoint.open(source)
    return {m: rows_absmax(read_tensor(checkpoint, f"{m}.weight")).max() for m in plan.quantized}


def make_checkpoint(source: Path, folder: Path, recipe: dict[str, Any], statistics: Statistics) -> Path:
    """Write `folder`/checkpoint, a sound one, and return it. Parameters of algorithms are taken from `folder`, if there are any."""
    folder.mkdir(exist_ok=True)
    statistics.write(folder)
    common = {
        "source": str(source),
        "folder": str(folder),
        "recipe": make_recipe(recipe).model_dump(mode="json"),
    }
    ranks, progress = Ranks.start(), Progress(folder, 0)
    decide = Job(
        "quantize",
        **common,
        inputs={"calibration": str(folder)},
        options={"max_shard_bytes": ONE_SHARD, "fail_on_unrouted_experts": False},
    )
    plan = plan_of(source, recipe)
    quantize.write_plan(decide, plan, Checkpoint.open(source), {"layers": {}, "warnings": []}, progress)
    export.run(Job("export", **common, inputs={"plan": str(folder)}), ranks, progress)
    faults = check_folder(folder / "checkpoint")
    assert not any(faults.values()), faults
    return folder / "checkpoint"


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
