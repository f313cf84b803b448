import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distribute.errors import RecipeError, SourceError
from distribute.layers import KEEP, QUANTIZE, Expert, decide, decoder_blocks, expert_of, fused_siblings, natural_key
from distribute.recipe import Recipe
from distribute.source import Checkpoint
from tests.checkpoints import decoder_tensors, write_checkpoint


def _decide(folder: Path, tensors: dict[str, torch.Tensor], recipe: Recipe | None = None, **config: object):
    checkpoint = Checkpoint.open(write_checkpoint(folder, tensors, **config))
    return decide(checkpoint, recipe or Recipe())


def _matrix(rows: int = 4, columns: int = 8) -> torch.Tensor:
    return torch.ones(rows, columns).bfloat16()


def test_linears_of_decoder_blocks_are_quantized_and_nothing_else(tmp_path: Path) -> None:
    decisions = _decide(tmp_path, decoder_tensors())
    kept = {m: d.reason for m, d in decisions.items() if d.action == KEEP}
    assert set(kept) == {"lm_head", "model.embed_tokens"}
    assert "output head" in kept["lm_head"] and "embedding" in kept["model.embed_tokens"]
    assert sum(d.action == QUANTIZE for d in decisions.values()) == 14
    assert not any("norm" in module for module in decisions)


def test_routers_towers_and_mtp_are_left_by_default(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.mlp.gate.weight": "router",
        "vision_tower.encoder.layers.0.fc1.weight": "vision tower",
        "multi_modal_projector.linear.weight": "vision projector",
        "mtp.fc.weight": "multi-token prediction",
        "audio_tower.layers.0.fc1.weight": "audio tower",
        "audio_tower.layers.1.fc1.weight": "audio tower",
        "model.vision_encoder.layers.1.fc1.weight": "vision tower",
        "model.layers.2.eh_proj.weight": "beyond the last decoder block",
    }
    decisions = _decide(tmp_path, decoder_tensors() | {name: _matrix() for name in extra})
    for name, reason in extra.items():
        decision = decisions[name.removesuffix(".weight")]
        assert decision.action == KEEP and reason in decision.reason


def test_a_language_model_inside_a_larger_one_is_found_by_its_text_config(tmp_path: Path) -> None:
    tensors = {f"language_model.{name}": tensor for name, tensor in decoder_tensors().items()}
    tensors |= {f"vision_tower.vision_model.encoder.layers.{i}.mlp.fc1.weight": _matrix() for i in range(2)}
    decisions = _decide(tmp_path, tensors, num_hidden_layers=None, text_config={"num_hidden_layers": 2})
    quantized = {m for m, d in decisions.items() if d.action == QUANTIZE}
    assert len(quantized) == 14 and all(m.startswith("language_model.model.layers.") for m in quantized)


def test_user_patterns_win_over_defaults(tmp_path: Path) -> None:
    recipe = Recipe(ignore=("model.layers.0.*", r"re:.*layers\.1\.mlp.*"), include=("lm_head",))
    decisions = _decide(tmp_path, decoder_tensors(), recipe)
    quantized = {m for m, d in decisions.items() if d.action == QUANTIZE}
    assert quantized == {"lm_head", *(f"model.layers.1.self_attn.{p}_proj" for p in "qkvo")}
    assert decisions["model.layers.0.mlp.up_proj"].reason == "recipe ignores model.layers.0.*"


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"'model\.layer\.0\.\*' matches no module"):
        _decide(tmp_path, decoder_tensors(), Recipe(ignore=("model.layer.0.*",)))


def test_fused_siblings_are_not_split(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"k_proj is kept .* one matrix"):
        _decide(tmp_path, decoder_tensors(), Recipe(ignore=("*.k_proj",)))


def test_experts_of_a_layer_are_not_split(tmp_path: Path) -> None:
    experts = {
        f"model.layers.0.mlp.experts.{e}.{p}.weight": _matrix()
        for e in range(2)
        for p in ("gate_proj", "up_proj", "down_proj")
    }
    with pytest.raises(RecipeError, match="one matrix"):
        _decide(tmp_path, decoder_tensors() | experts, Recipe(ignore=("*.experts.1.*",)))


def test_leaving_everything_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing would be quantized"):
        _decide(tmp_path, decoder_tensors(), Recipe(ignore=("model.layers.*",)))


def test_experts_in_one_tensor_are_refused_unless_ignored(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 8, 16).bfloat16()}
    with pytest.raises(SourceError, match="3-D"):
        _decide(tmp_path / "a", tensors)
    decisions = _decide(tmp_path / "b", tensors, Recipe(ignore=("*.experts.*",)))
    assert any(d.action == QUANTIZE for d in decisions.values())


def test_a_weight_that_is_no_float_is_refused(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {"model.layers.0.mlp.up_proj.weight": torch.ones(12, 8, dtype=torch.int32)}
    with pytest.raises(SourceError, match="I32"):
        _decide(tmp_path, tensors)


def test_the_number_of_layers_must_be_known_and_present() -> None:
    names = ["model.layers.0.a.weight", "model.layers.1.a.weight"]
    assert decoder_blocks(names, {"num_hidden_layers": 2}) == {"model.layers": 2}
    assert decoder_blocks(names, {"n_layer": 1}) == {"model.layers": 1}
    with pytest.raises(SourceError, match="how many layers"):
        decoder_blocks(names, {})
    with pytest.raises(SourceError, match="list of 3"):
        decoder_blocks(names, {"num_hidden_layers": 3})


def test_expert_names_are_taken_apart() -> None:
    assert expert_of("model.layers.0.mlp.experts.12.up_proj") == Expert("model.layers.0.mlp.experts", 12, "up_proj")
    assert expert_of("model.layers.0.mlp.up_proj") is None


def test_fused_siblings_are_found_in_natural_order() -> None:
    modules = [f"l.{i}.{leaf}" for i in (10, 2) for leaf in ("v_proj", "q_proj", "up_proj")]
    assert fused_siblings(modules) == [("l.2.q_proj", "l.2.v_proj"), ("l.10.q_proj", "l.10.v_proj")]


def test_natural_order() -> None:
    assert sorted(["l.10.a", "l.2.a", "l.2", "k"], key=natural_key) == ["k", "l.2", "l.2.a", "l.10.a"]


@given(st.lists(st.text("l.12009é_", max_size=9), max_size=12))
def test_numbers_are_compared_as_numbers_and_text_as_text(names: list[str]) -> None:
    def parts(name: str) -> list[tuple[int, str]]:
        split = re.split(r"(\d+)", name)
        return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(split)]

    assert sorted(names, key=natural_key) == sorted(names, key=parts)


def test_widths_without_whole_groups_are_refused_with_the_choices(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    tensors |= {f"model.layers.{i}.mlp.down_proj.weight": torch.randn(8, 96).bfloat16() for i in (0, 1)}
    only_down = ("*.self_attn.*", "*.up_proj", "*.gate_proj")
    with pytest.raises(RecipeError, match=r"96 input features, which are no whole groups of 128 .*group_size: 32 "):
        _decide(tmp_path / "a", tensors, Recipe(preset="int4", ignore=only_down))
    with pytest.raises(
        RecipeError, match=r"gate_proj has 8 input features, which are no whole groups of 16 .*like fp8"
    ):
        _decide(tmp_path / "b", tensors, Recipe(preset="nvfp4"))
    found = _decide(tmp_path / "c", tensors, Recipe(preset="int4", group_size="auto", ignore=only_down))
    quantized = [decision for decision in found.values() if decision.action == QUANTIZE]
    assert {(decision.preset, decision.group_size) for decision in quantized} == {("int4", 32)}


def test_layers_that_engines_fuse_need_one_preset(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"q_proj is fp8_dynamic but .*v_proj is fp8; .*give one preset to all of"):
        _decide(tmp_path, decoder_tensors(), Recipe(overrides={"*.q_proj": "fp8_dynamic"}))
