"""What the user types to say how a model is quantized. Torch-free.

A recipe is a preset plus patterns plus a dialect; presets are in distribute/scheme.py. A name pattern is either a
shell pattern (`model.layers.0.*`) or, after `re:`, a regular expression matched from the start of the name.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from distribute.errors import RecipeError
from distribute.scheme import GROUP_SIZES, PRESETS, Algorithm, Dialect, Scheme

#: Left as they are unless the recipe includes them. Patterns follow the defaults of the ModelOpt presets.
DEFAULT_IGNORE: dict[str, str] = {
    "*lm_head*": "output head",
    "*output_layer*": "output head",
    "*embed_tokens*": "embedding",
    "*.gate": "router",
    "*.router*": "router",
    "*shared_expert_gate*": "router",
    "*vision*": "vision tower",
    "*visual*": "vision tower",
    "*audio*": "audio tower",
    "*speech*": "audio tower",
    "*multi_modal_projector*": "vision projector",
    "mtp.*": "multi-token prediction",
    "*.mtp.*": "multi-token prediction",
    "*linear_attn.conv1d*": "convolution",
    "*linear_attn.in_proj_a*": "small projection",
    "*linear_attn.in_proj_b*": "small projection",
    "*mixer.conv1d*": "convolution",
}


def matches(pattern: str, name: str) -> bool:
    """Whether a recipe pattern names this module or tensor."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


def _known_preset(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"unknown preset {value!r}; known presets: {', '.join(PRESETS)}")
    return value


class Auto(BaseModel):
    """Presets by budget: each group of layers gets the one that measurement finds worth its bits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bits: float = Field(
        gt=0, le=32, description="of a weight in the mean, scales included, over the layers that may be quantized"
    )
    presets: tuple[str, ...] = Field(
        default=("nvfp4", "fp8"), description="candidates, beside the recipe's own preset"
    )
    keep: bool = Field(default=True, description="a group may also stay as it is")

    @field_validator("presets")
    @classmethod
    def _presets_are_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_known_preset, value))


class Recipe(BaseModel):
    """A preset, a dialect, what differs from the preset and where, and what to leave alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str = Field(default="fp8", description=f"one of {', '.join(PRESETS)}")
    dialect: Dialect = Field(default="modelopt", description="names, scales and JSON of the written checkpoint")
    ignore: tuple[str, ...] = Field(default=(), description="name patterns that stay as they are")
    include: tuple[str, ...] = Field(
        default=(), description="name patterns to quantize although the default ignore list names them"
    )
    overrides: dict[str, str] = Field(
        default={}, description="name pattern -> preset of what it names; the first that matches decides"
    )
    group_size: Literal["auto"] | int | None = Field(
        default=None,
        description=f"of int4: {', '.join(map(str, GROUP_SIZES))}, or auto: the largest that fits",
    )
    symmetric: bool | None = Field(default=None, description="of int4 groups; false: with zero points")
    kv_cache: Literal["fp8", "nvfp4"] | None = Field(default=None, description="format of the K/V cache")
    algorithm: Algorithm | None = Field(default=None, description="in place of the preset's own")
    auto: Auto | None = Field(default=None, description="choose the presets by measurement, under a budget of bits")

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, value: str) -> str:
        return _known_preset(value)

    @field_validator("overrides")
    @classmethod
    def _overrides_are_known(cls, value: dict[str, str]) -> dict[str, str]:
        cls._valid_patterns(tuple(value))
        return {pattern: _known_preset(preset) for pattern, preset in value.items()}

    @field_validator("group_size")
    @classmethod
    def _group_size_is_known(cls, value: Literal["auto"] | int | None) -> Literal["auto"] | int | None:
        if isinstance(value, int) and value not in GROUP_SIZES:
            raise ValueError(f"{value} is no group size of int4; allowed: {', '.join(map(str, GROUP_SIZES))}, auto")
        return value

    @field_validator("ignore", "include")
    @classmethod
    def _valid_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            if not pattern or pattern == "re:":
                raise ValueError("an empty pattern; write a module name, a shell pattern or re:<expression>")
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _presets_fit(self) -> "Recipe":
        for preset in self.presets:
            if reason := PRESETS[preset].refused.get(self.dialect):
                raise ValueError(f"preset {preset} has no {self.dialect} form: {reason}")
            scheme = self.scheme_of(preset)
            if scheme.algorithm.name == "gptq" and not scheme.weights.format.startswith("int"):
                raise ValueError(f"gptq works on integer codes, but {preset} stores {scheme.weights.format}")
            if self.dialect == "modelopt" and not scheme.weights.symmetric:
                raise ValueError("zero points (symmetric: false) have no modelopt form; use compressed-tensors")
        if self.kv_cache == "nvfp4" and self.dialect == "compressed-tensors":
            raise ValueError("kv_cache nvfp4 has no compressed-tensors form; use fp8 or the modelopt dialect")
        return self

    @property
    def presets(self) -> tuple[str, ...]:
        """Every preset that this recipe may apply."""
        return tuple(dict.fromkeys((*self.candidates, *self.overrides.values())))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Presets of what no override names: one, or those that a measurement chooses from."""
        return tuple(dict.fromkeys((self.preset, *(self.auto.presets if self.auto else ()))))

    @property
    def observes(self) -> bool:
        """Whether the calibrate stage runs text through the model, to measure ranges."""
        schemes = map(self.scheme_of, self.presets)
        return self.kv_cache is not None or any(one.static_inputs and not one.is_solved for one in schemes)

    @property
    def solves(self) -> bool:
        """Whether the quantize stage runs text through the model, for an algorithm that needs more than ranges."""
        return any(self.scheme_of(preset).is_solved for preset in self.presets)

    @property
    def needs_data(self) -> bool:
        """Whether calibration text is needed."""
        return self.auto is not None or self.observes or self.solves

    def preset_of(self, module: str) -> str:
        """The preset of a module that is quantized."""
        return next((preset for pattern, preset in self.overrides.items() if matches(pattern, module)), self.preset)

    def scheme_of(self, preset: str, group_size: int = 0) -> Scheme:
        """What a preset means in this recipe; `group_size` in place of its own where the size may be chosen."""
        scheme = PRESETS[preset].for_dialect(self.dialect)
        weights, changes = scheme.weights, {}
        if weights.format == "int4":
            given = self.group_size if isinstance(self.group_size, int) else 0
            changes = {"group_size": group_size or given or weights.group_size}
            if self.symmetric is not None and scheme.inputs is None:
                changes["symmetric"] = self.symmetric
        return scheme.model_copy(
            update={
                "weights": weights.model_copy(update=changes),
                "algorithm": self.algorithm or scheme.algorithm,
            }
        )


def load_recipe(given: str, **changes: Any) -> Recipe:
    """A preset name or a YAML file, with `changes` (None: not given) on top.

    Raises:
        RecipeError: neither a preset nor a file; or the file is not a valid recipe.
    """
    if given in PRESETS:
        values: Any = {"preset": given}
    elif Path(given).is_file():
        values = _read_yaml(Path(given))
    else:
        raise RecipeError(
            f"recipe {given!r} is neither a preset nor a file; presets: {', '.join(PRESETS)}; "
            "or give the path of a YAML file"
        )
    values |= {key: value for key, value in changes.items() if value is not None}
    return make_recipe(values, origin=given)


def make_recipe(values: dict[str, Any], origin: str = "recipe") -> Recipe:
    """Validate a mapping as a recipe; raises RecipeError with one line a fault."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'recipe'}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors()
        )
        raise RecipeError(f"{origin}: {faults}; fields: {', '.join(Recipe.model_fields)}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RecipeError(f"recipe file {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"recipe file {path} must hold a mapping, for example 'preset: fp8'")
    return values
