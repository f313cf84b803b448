"""Algorithms over a model with the formats that are written, in both dialects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distribute.encode import PARAMETERS
from distribute.linear import Linear
from distribute.roundings import shares
from distribute.scheme import PRESETS
from tests.distribute.test_solve import changes_of, distance, logits, model_with, plain_model, solved, subject_of
from tests.toy_codec import ToyCodec

GPTQ, AWQ = {"name": "gptq"}, {"name": "awq", "clip": True}


@pytest.mark.parametrize(
    ("preset", "dialect", "recipe"),
    [
        pytest.param("int4_gptq", "modelopt", {}, id="gptq, rows in pairs"),
        pytest.param("int4_gptq", "compressed-tensors", {}, id="gptq, packed"),
        pytest.param("int4_gptq", "compressed-tensors", {"symmetric": False}, id="gptq, zero points"),
        pytest.param(
            "int4_gptq",
            "compressed-tensors",
            {"algorithm": {"name": "gptq", "static_order": False}},
            id="left to right",
        ),
        pytest.param("int8_weight_only", "compressed-tensors", {"algorithm": GPTQ}, id="gptq, int8 rows"),
        pytest.param("int4_awq", "compressed-tensors", {"algorithm": AWQ, "symmetric": False}, id="awq, zero points"),
        pytest.param("w4a8", "modelopt", {}, id="awq, two stages"),
        pytest.param("nvfp4_awq", "modelopt", {}, id="awq, nvfp4"),
        pytest.param("nvfp4_awq", "compressed-tensors", {}, id="awq, nvfp4 packed"),
    ],
)
def test_every_format_is_solved_below_the_cost_of_nearest(
    preset: str,
    dialect: str,
    recipe: dict[str, Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = tiny_model("llama")
    subject = subject_of(folder, preset, dialect, **recipe)
    parameters, report = solved(subject, tmp_path)
    costs = [cost for layer in report["layers"].values() for cost in layer["errors"].values()]
    assert len(costs) == len(subject.schemes) == 14
    assert sum(cost["solved"] for cost in costs) < sum(cost["nearest"] for cost in costs)
    source = logits(plain_model(folder))
    solved_model = logits(model_with(folder, changes_of(subject, parameters, coded=True)))
    assert distance(solved_model, source) < distance(
        logits(model_with(folder, changes_of(subject, {}, coded=True))), source
    )
    assert len(list((tmp_path / PARAMETERS).glob("*"))) == 2


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_rows_are_dealt_out_whole_and_evenly(world: int) -> None:
    scheme = PRESETS["int4_gptq"].scheme
    sizes = {"a": (200, 64), "b": (65, 128), "c": (1, 32)}
    linears = {name: Linear(name, torch.empty(shape), scheme, ToyCodec()) for name, shape in sizes.items()}
    dealt = shares(linears, world)
    assert len(dealt) == world
    rows = [(run.module, row) for own in dealt for run in own for row in run.rows]
    assert rows == [(name, row) for name, (count, _) in sizes.items() for row in range(count)]
    assert all(run.rows.start % 64 == 0 for own in dealt for run in own)
    work = [sum(len(run.rows) * sizes[run.module][1] for run in own) for own in dealt]
    assert max(work) <= sum(work) / world + 64 * 128
