"""Every dialect a recipe may name speaks for every preset."""

from typing import get_args

import pytest

from distribute.dialects.table import DIALECTS
from distribute.numerics.fp8 import CODECS
from distribute.recipe import PRESETS, Dialect


def test_every_dialect_of_the_recipe_is_in_the_table() -> None:
    assert set(DIALECTS) == set(get_args(Dialect))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_codec_exists(dialect: str, preset: str) -> None:
    assert DIALECTS[dialect].codec(PRESETS[preset]) in CODECS
