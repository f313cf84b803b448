"""Recipes as people write them: what is taken, and what is refused with which words."""

import re
from typing import Any

import pytest
import yaml

from distribute.errors import RecipeError
from distribute.recipe import make_recipe
from distribute.scheme import PRESETS
from tests.torchrun import ROOT


def test_the_recipes_of_the_documentation_are_recipes() -> None:
    for page, least in (("docs/recipes.md", 2), ("README.md", 1)):
        blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
        recipes = [yaml.safe_load(block) for block in blocks if block.startswith("preset:")]
        assert len(recipes) >= least
        for recipe in recipes:
            make_recipe(recipe)


def test_every_preset_is_documented() -> None:
    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## YAML")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(PRESETS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"preset": "int3"}, "unknown preset 'int3'; known presets: fp8"),
        ({"preset": "w4a8", "dialect": "compressed-tensors"}, "no compressed-tensors form: no engine reads"),
        ({"overrides": {"*": "w4a8"}, "dialect": "compressed-tensors"}, "preset w4a8 has no"),
        ({"preset": "int4", "group_size": 48}, "48 is no group size of int4; allowed: 128, 64, 32, auto"),
        ({"preset": "int4", "symmetric": False}, "have no modelopt form; use compressed-tensors"),
        ({"kv_cache": "nvfp4", "dialect": "compressed-tensors"}, "use fp8 or the modelopt dialect"),
        ({"preset": "fp8", "algorithm": {"name": "gptq"}}, "gptq works on integer codes, but fp8 stores fp8"),
        ({"overrides": {"": "fp8"}}, "an empty pattern"),
        ({"algorithm": {"name": "awq", "speed": 3}}, "Extra inputs are not permitted"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe(values)
    assert words in str(caught.value)


def test_text_is_needed_where_something_is_measured() -> None:
    needs = {preset: make_recipe({"preset": preset}).needs_data for preset in PRESETS}
    free = {"fp8_dynamic", "fp8_block", "int8_weight_only", "int4", "nvfp4_weight_only", "mxfp4", "mxfp8"}
    assert {preset for preset, needed in needs.items() if not needed} == free
    assert make_recipe({"preset": "mxfp8", "kv_cache": "fp8"}).observes
    solved = make_recipe({"preset": "int4_awq"})
    assert solved.solves and not solved.observes


def test_the_first_override_that_matches_decides() -> None:
    recipe = make_recipe({"preset": "nvfp4", "overrides": {"*.up_proj": "fp8", "*.mlp.*": "mxfp8"}})
    modules = ("m.mlp.up_proj", "m.mlp.down_proj", "m.q_proj")
    assert [recipe.preset_of(module) for module in modules] == ["fp8", "mxfp8", "nvfp4"]
