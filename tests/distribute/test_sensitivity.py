"""Measured errors against a plain model that is run in one piece."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from distribute.auto import Table
from distribute.calibrate import samples_of
from distribute.dialects.table import DIALECTS
from distribute.job import Job
from distribute.layers import KEEP
from distribute.numerics.inputs import coded_inputs
from distribute.numerics.table import find_codec
from distribute.recipe import Recipe, make_recipe
from tests.models import SENTENCES
from tests.stages import CALIBRATION, run_stage

Model = Callable[..., Path]


def job_of(source: Path, root: Path, **recipe: Any) -> Job:
    text = root.parent / "text.jsonl"
    text.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES * 3))
    full = make_recipe(recipe).model_dump(mode="json")
    return Job("sensitivity", str(source), str(root), full, {}, CALIBRATION | {"data": str(text)})


def inputs_of(job: Job) -> dict[str, Tensor]:
    """[rows, in] in the model's dtype: what a plain forward gives every linear layer."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job.source, dtype="auto").eval()
    seen: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name, []).append(args[0].flatten(0, -2))
            )
    with torch.no_grad():
        for sample in samples_of(job).tokens:
            model(sample[None])
    return {name: torch.cat(parts) for name, parts in seen.items()}


def noise_of(x: Tensor, weight: Tensor, preset: str, dialect: str, whole: Tensor) -> float:
    """Noise by size of one layer's outputs, in fp64, input by input. `whole`: absmax of those who share it."""
    scheme = Recipe(preset=preset, dialect=dialect).scheme_of(preset)
    codec = find_codec(DIALECTS[dialect].codec(scheme))
    values = codec.weight_values(whole, tuple(weight.shape), weight.dtype)
    coded = codec.decode({**values, **codec.encode(weight, values)}, weight.shape[1]).double()
    noise = (x.double() @ (coded - weight.double()).T).square().sum()
    if scheme.inputs is not None:
        how = scheme.inputs
        given = coded_inputs(
            x, x.abs().max().float(), form=how.format, granularity=how.granularity, group_size=how.group_size,
            dialect=dialect,
        )  # fmt: skip
        noise += ((given.double() - x.double()) @ coded.T).square().sum()
    return float(noise / (x.double() @ weight.double().T).square().sum())


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_errors_are_those_of_a_plain_model(tiny_model: Model, tmp_path: Path, dialect: str) -> None:
    presets = ["nvfp4", "fp8", "fp8_dynamic", "fp8_block", "int8", "mxfp4", "int8_weight_only"]
    auto = {"bits": 12, "presets": presets}
    job = job_of(tiny_model("llama"), tmp_path / "stage", dialect=dialect, auto=auto)
    run_stage(job)
    table = Table.read(Path(job.folder))
    inputs = inputs_of(job)
    weights = AutoModelForCausalLM.from_pretrained(job.source, dtype="auto").state_dict()
    for group in table.groups:
        own = [weights[f"{name}.weight"] for name in group.names]
        for choice in group.choices:
            if choice.preset == KEEP:
                assert choice.error == 0
                continue
            together = torch.stack([weight.abs().max().float() for weight in own]).max()
            wholes = [together if choice.preset == "nvfp4" else weight.abs().max().float() for weight in own]
            expected = sum(
                noise_of(inputs[name], weight, choice.preset, dialect, whole)
                for name, weight, whole in zip(group.names, own, wholes, strict=True)
            )
            assert choice.error == pytest.approx(expected, rel=0.02), (group.names, choice.preset)


def test_more_bits_lose_less(tiny_model: Model, tmp_path: Path) -> None:
    job = job_of(tiny_model("qwen3_moe"), tmp_path / "stage", auto={"bits": 6, "presets": ["nvfp4", "mxfp8"]})
    run_stage(job)
    for group in Table.read(Path(job.folder)).groups:
        errors = {choice.preset: choice.error for choice in group.choices}
        assert errors["nvfp4"] > 2 * errors["fp8"] > 0 == errors[KEEP]


def test_any_number_of_ranks_measures_the_same(tiny_model: Model, tmp_path: Path) -> None:
    tables = []
    for world in (1, 3):
        job = job_of(tiny_model("mixtral"), tmp_path / f"{world}", auto={"bits": 6})
        run_stage(job, world)
        tables.append(Table.read(Path(job.folder)))
    for one, other in zip(tables[0].groups, tables[1].groups, strict=True):
        assert one.names == other.names
        for left, right in zip(one.choices, other.choices, strict=True):
            assert (left.preset, left.bits) == (right.preset, right.bits)
            assert left.error == pytest.approx(right.error, rel=1e-5)
