from pathlib import Path

import pytest
import torch

from distribute.dialects.spec import ShareGroups
from distribute.encode import StageTensors
from distribute.errors import SourceError, StageError
from distribute.numerics.observers import rows_absmax
from distribute.plan import Plan, make_plan
from distribute.quantize import scale_values, share_inputs
from distribute.recipe import make_recipe
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from distribute.tensors import DTYPES
from tests.checkpoints import decoder_tensors, write_checkpoint


def _plan(folder: Path, tensors: dict[str, torch.Tensor], **recipe: str) -> tuple[Plan, Statistics]:
    checkpoint = Checkpoint.open(write_checkpoint(folder, tensors))
    plan = make_plan(checkpoint, make_recipe(dict(recipe)), 1 << 30)
    weights = {m: rows_absmax(tensors[f"{m}.weight"]).max() for m in plan.quantized}
    inputs = {m: torch.tensor(float(i + 1)) for i, m in enumerate(plan.quantized)}
    return plan, Statistics(weights, inputs)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("preset", ["fp8", "fp8_dynamic"])
def test_values_have_the_dtype_and_shape_that_was_planned(tmp_path: Path, dialect: str, preset: str) -> None:
    plan, statistics = _plan(tmp_path, decoder_tensors(), dialect=dialect, preset=preset)
    values, fallbacks = scale_values(plan, statistics, StageTensors(tmp_path, ()))
    planned = {o.name: (DTYPES[o.dtype], o.shape) for o in plan.outputs if o.codec == "value"}
    stored = {name: value for name, value in values.items() if "#" not in name}
    assert {name: (value.dtype, tuple(value.shape)) for name, value in stored.items()} == planned
    assert fallbacks == {}
    pointers = [value.data_ptr() for value in values.values()]
    assert len(set(pointers)) == len(pointers), "a shared tensor would lose a key on save"


def test_a_layer_without_input_is_an_error(tmp_path: Path) -> None:
    plan, statistics = _plan(tmp_path, decoder_tensors())
    del statistics.input_absmax["model.layers.0.mlp.up_proj"]
    with pytest.raises(StageError, match=r"1 quantized layers saw no input .* model\.layers\.0\.mlp\.up_proj"):
        scale_values(plan, statistics, StageTensors(tmp_path, ()))


def test_a_weight_that_overflows_the_model_dtype_is_refused(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    tensors[name][0, 0] = 1e6
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, dtype="float16"))
    plan = make_plan(checkpoint, make_recipe({"preset": "fp8_dynamic"}), 1 << 30)
    weights = {m: rows_absmax(tensors[f"{m}.weight"]).max() for m in plan.quantized}
    with pytest.raises(SourceError, match=r"up_proj.*overflows F16"):
        scale_values(plan, Statistics(weights), StageTensors(tmp_path, ()))


EXPERTS = ("m.experts.0.w1", "m.experts.1.w1", "m.experts.2.w1")


def _inputs(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def test_members_of_an_input_group_take_the_largest() -> None:
    shared, fallbacks = share_inputs("abc", _inputs(a=1.0, b=3.0, c=2.0), ShareGroups(input=(("a", "b"),)))
    assert {name: value.item() for name, value in shared.items()} == {"a": 3.0, "b": 3.0, "c": 2.0}
    assert fallbacks == {}


def test_a_fallback_group_changes_only_members_that_saw_nothing() -> None:
    a, b, c = EXPERTS
    shared, fallbacks = share_inputs(EXPERTS, _inputs(**{a: 1.0, b: 3.0}), ShareGroups(input_fallback=(EXPERTS,)))
    assert {name: value.item() for name, value in shared.items()} == {a: 1.0, b: 3.0, c: 3.0}
    assert list(fallbacks) == [c] and "2 siblings" in fallbacks[c]


def test_a_dead_member_of_an_input_group_is_counted_too() -> None:
    a, b, _ = EXPERTS
    shared, fallbacks = share_inputs((a, b), _inputs(**{a: 1.0}), ShareGroups(input=((a, b),)))
    assert shared[b].item() == 1.0 and list(fallbacks) == [b]
