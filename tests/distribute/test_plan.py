from pathlib import Path

import pytest
import torch

from benchmarks.plan import make_stubs
from distribute.errors import SourceError
from distribute.plan import COPY, VALUE, Plan, find_model_dtype, make_plan
from distribute.recipe import make_recipe
from distribute.source import Checkpoint
from distribute.work import PIECE_BYTES, spread
from tests.checkpoints import decoder_tensors, write_checkpoint


def _plan(
    folder: Path, limit: int = 1 << 30, *, tensors: dict[str, torch.Tensor] | None = None, **recipe: str
) -> Plan:
    checkpoint = Checkpoint.open(write_checkpoint(folder, tensors or decoder_tensors()))
    return make_plan(checkpoint, make_recipe(dict(recipe)), limit)


def test_every_source_tensor_is_written_once(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    sources = [output.source for output in plan.outputs if output.source]
    assert sorted(sources) == sorted(decoder_tensors())
    names = [output.name for output in plan.outputs]
    assert len(names) == len(set(names)) == 21 + 2 * 14


@pytest.mark.parametrize(
    ("dialect", "preset", "weight_scale", "input_scale"),
    [
        ("modelopt", "fp8", ("F32", ()), ("F32", ())),
        ("modelopt", "fp8_dynamic", ("F32", (12,)), None),
        ("compressed-tensors", "fp8", ("BF16", (1,)), ("BF16", (1,))),
        ("compressed-tensors", "fp8_dynamic", ("BF16", (12, 1)), None),
    ],
)
def test_tensors_of_a_quantized_layer(
    tmp_path: Path, dialect: str, preset: str, weight_scale: tuple, input_scale: tuple | None
) -> None:
    plan = _plan(tmp_path, dialect=dialect, preset=preset)
    by_name = {output.name: output for output in plan.outputs}
    module = "model.layers.1.mlp.up_proj"
    weight = by_name[f"{module}.weight"]
    assert (weight.dtype, weight.shape, weight.rows, weight.columns) == ("F8_E4M3", (12, 8), 12, 8)
    scale = by_name[f"{module}.weight_scale"]
    assert (scale.dtype, scale.shape, scale.codec == VALUE) == (*weight_scale, preset == "fp8")
    found = by_name.get(f"{module}.input_scale")
    assert (None if found is None else (found.dtype, found.shape)) == input_scale
    assert by_name["model.norm.weight"].codec == COPY


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = _plan(tmp_path / "m", 500)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    write_checkpoint(tmp_path, decoder_tensors(seed=3))
    with pytest.raises(SourceError, match="has changed"):
        plan.check_source(Checkpoint.open(tmp_path))


def test_a_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, tie_word_embeddings=True))
    plan = make_plan(checkpoint, make_recipe({}), 1 << 30)
    assert plan.dropped == ["lm_head.weight"]
    assert "lm_head.weight" not in {output.name for output in plan.outputs}


def test_an_oversized_tensor_is_warned_about(tmp_path: Path) -> None:
    warnings = _plan(tmp_path, 100).warnings
    assert any(w.startswith("lm_head.weight has 256 bytes") for w in warnings)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({"dtype": "float16"}, "F16"), ({"dtype": None, "torch_dtype": "float32"}, "F32"), ({"dtype": None}, "BF16")],
)
def test_model_dtype_is_that_of_loading(tmp_path: Path, config: dict[str, str | None], expected: str) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, decoder_tensors(), **config))
    plan = make_plan(checkpoint, make_recipe({}), 1 << 30)
    assert plan.model_dtype == expected
    assert find_model_dtype(checkpoint, {d.module: d for d in plan.decisions}) == expected


def test_a_head_that_is_not_stored_is_ignored_whatever_the_config_says(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    del tensors["lm_head.weight"]
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors, tie_word_embeddings=None))
    plan = make_plan(checkpoint, make_recipe({"dialect": "compressed-tensors"}), 1 << 30)
    assert plan.config_changes["quantization_config"]["ignore"] == ["lm_head"]


def test_a_thousand_ranks_share_a_large_model_evenly(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_stubs(tmp_path, layers=4, experts=512, moe=2048))  # 52 GB of holes
    plan = make_plan(checkpoint, make_recipe({}), 1_000_000_000)
    assert len(checkpoint.tensors) == 6183 and len(plan.files) > 50
    encode = spread(plan, 1000).summary()["encode"]
    assert encode["mean"] == sum(output.nbytes for output in plan.outputs) / 1000
    assert encode["busiest"] <= min(encode["mean"] + PIECE_BYTES / 2 + 1, 1.05 * encode["mean"])


@pytest.mark.parametrize(("size", "warned"), [(128, 0), (136, 1)])
def test_blocks_that_are_cut_off_are_warned_of(tmp_path: Path, size: int, warned: int) -> None:
    tensors = decoder_tensors()
    tensors |= {name: torch.zeros(size, 128).bfloat16() for name in tensors if name.endswith("_proj.weight")}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, tensors))
    warnings = make_plan(checkpoint, make_recipe({"preset": "fp8_block"}), 1 << 30).warnings
    assert sum("no whole blocks of 128 x 128" in warning for warning in warnings) == warned
