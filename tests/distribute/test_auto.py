"""Presets by budget: groups, candidates, and the recipe that is written out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distribute.allocation import BudgetError, Choice, Group
from distribute.auto import Inquiry, Table, choose, groups_of, inquire, largest
from distribute.errors import RecipeError
from distribute.layers import KEEP, decide
from distribute.plan import make_plan
from distribute.recipe import Recipe, make_recipe
from distribute.source import Checkpoint

Model = Callable[..., Path]


def inquiry_of(folder: Path, **recipe: Any) -> Inquiry:
    return inquire(Checkpoint.open(folder), make_recipe({"auto": {"bits": 6.0}} | recipe))


def table_of(inquiry: Inquiry, errors: dict[str, float]) -> Table:
    """A table in which every group loses the same by a preset."""
    groups = (
        Group(q.names, q.weights, tuple(Choice(c.preset, c.bits, errors[c.preset]) for c in q.candidates))
        for q in inquiry.questions
    )
    return Table(None, tuple(groups))


def test_layers_that_engines_fuse_are_one_group() -> None:
    prefix = "model.layers.0"
    names = [f"{prefix}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]
    experts = [f"{prefix}.mlp.experts.{i}.{leaf}" for i in (0, 1) for leaf in ("down_proj", "gate_proj", "up_proj")]
    assert groups_of([*names, *experts]) == [tuple(experts), (names[3],), (names[0], names[1], names[2])]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("preset", ["nvfp4", "fp8", "mxfp8", "int8"])
def test_bits_of_a_candidate_are_those_of_the_checkpoint(tiny_model: Model, dialect: str, preset: str) -> None:
    """What a plan of that one preset adds to the bytes that do not depend on it."""
    folder = tiny_model("llama")
    inquiry = inquiry_of(folder, dialect=dialect, preset=preset)
    plan = make_plan(Checkpoint.open(folder), Recipe(preset=preset, dialect=dialect), 10**9)
    stored = sum(output.nbytes for output in plan.outputs if output.name.rpartition(".")[0] in plan.quantized)
    bits = sum(c.bits for q in inquiry.questions for c in q.candidates if c.preset == preset)
    assert bits == 8 * stored


def test_a_preset_that_does_not_fit_a_layer_is_no_candidate_there(tiny_model: Model) -> None:
    inquiry = inquiry_of(tiny_model("llama", hidden=48), preset="int4", auto={"bits": 8, "presets": ["fp8"]})
    assert all(c.preset in ("fp8", KEEP) for q in inquiry.questions for c in q.candidates)
    with pytest.raises(RecipeError, match="none of int4 fits model"):
        inquiry_of(tiny_model("llama", hidden=48), preset="int4", auto={"bits": 8, "presets": [], "keep": False})


def test_an_override_leaves_a_group_one_candidate(tiny_model: Model) -> None:
    inquiry = inquiry_of(tiny_model("llama"), overrides={"*.down_proj": "mxfp8"})
    for question in inquiry.questions:
        presets = [candidate.preset for candidate in question.candidates]
        assert presets == (["mxfp8"] if question.names[0].endswith("down_proj") else ["fp8", "nvfp4", KEEP])


def test_the_recipe_that_follows_decides_as_the_choice_did(tiny_model: Model) -> None:
    folder = tiny_model("mixtral")
    inquiry = inquiry_of(folder, ignore=["*layers.1.self_attn.o_proj"])
    found, allocation = choose(inquiry.recipe, table_of(inquiry, {"nvfp4": 0.1, "fp8": 0.01, KEEP: 0.0}))
    assert found.auto is None and {c.preset for c in allocation.choices} > {"nvfp4"}
    decisions = decide(Checkpoint.open(folder), found)
    for question, choice in zip(inquiry.questions, allocation.choices, strict=True):
        for name in question.names:
            decided = decisions[name].preset if decisions[name].action != KEEP else KEEP
            assert decided == choice.preset, name
    assert allocation.bits <= 6.0


def test_a_budget_below_the_smallest_preset_is_refused_with_the_least(tiny_model: Model) -> None:
    inquiry = inquiry_of(tiny_model("llama"), auto={"bits": 4.2})
    with pytest.raises(BudgetError, match=r"the least that these presets allow is 4\.\d+"):
        choose(inquiry.recipe, table_of(inquiry, {"nvfp4": 0.1, "fp8": 0.01, KEEP: 0.0}))


def test_before_anything_is_measured_a_plan_of_the_budget_can_be_made(tiny_model: Model) -> None:
    folder = tiny_model("llama")
    inquiry = inquiry_of(folder, auto={"bits": 9.0})
    plan = make_plan(Checkpoint.open(folder), largest(inquiry), 10**9)
    weights = sum(question.weights for question in inquiry.questions)
    matrices = {f"{name}." for question in inquiry.questions for name in question.names}
    stored = sum(o.nbytes for o in plan.outputs if f"{o.name.rpartition('.')[0]}." in matrices)
    assert 8.0 < 8 * stored / weights <= 9.0


def test_group_size_auto_is_decided_once_for_all(tiny_model: Model) -> None:
    inquiry = inquiry_of(tiny_model("llama"), preset="int4", group_size="auto", auto={"bits": 6, "presets": ["fp8"]})
    assert inquiry.recipe.group_size == 64
    found, _ = choose(inquiry.recipe, table_of(inquiry, {"int4": 0.1, "fp8": 0.01, KEEP: 0.0}))
    assert found.group_size == 64


def test_a_table_survives_its_file(tiny_model: Model, tmp_path: Path) -> None:
    table = table_of(inquiry_of(tiny_model("llama")), {"nvfp4": 0.1, "fp8": 0.01, KEEP: 0.0})
    table.write(tmp_path)
    assert Table.read(tmp_path) == table


@pytest.mark.parametrize(
    ("auto", "message"),
    [
        ({"bits": 0}, "auto.bits"),
        ({"bits": 5, "presets": ["int3"]}, "unknown preset 'int3'"),
        ({"bits": 5, "presets": ["w4a8"]}, "no compressed-tensors form"),
        ({}, "auto.bits"),
    ],
)
def test_a_wrong_auto_is_refused(auto: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_recipe({"dialect": "compressed-tensors", "auto": auto})
