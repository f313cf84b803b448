"""What the user types to say how a model is quantized. Torch-free.

A recipe is a preset plus patterns plus a dialect. Presets are plain data: a `Scheme` says how weights and
inputs of a linear layer are coded. A name pattern is either a shell pattern (`model.layers.0.*`) or, after
`re:`, a regular expression matched from the start of the name.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from distribute.errors import RecipeError

Dialect = Literal["modelopt", "compressed-tensors"]


class Quantizer(BaseModel):
    """How one operand of a linear layer is coded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["fp8"] = Field(description="number format of one element: fp8 is e4m3")
    granularity: Literal["tensor", "channel", "token"] = Field(description="how many elements share one scale")
    dynamic: bool = Field(default=False, description="the scale is computed by the engine at run time")


class Scheme(BaseModel):
    """How a linear layer is coded: y = dequantize(weights) @ dequantize(inputs)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: Quantizer
    inputs: Quantizer | None

    @property
    def needs_data(self) -> bool:
        """Whether calibration text is needed: an input scale that is not computed at run time."""
        return self.inputs is not None and not self.inputs.dynamic


PRESETS: dict[str, Scheme] = {
    "fp8": Scheme(
        weights=Quantizer(format="fp8", granularity="tensor"),
        inputs=Quantizer(format="fp8", granularity="tensor"),
    ),
    "fp8_dynamic": Scheme(
        weights=Quantizer(format="fp8", granularity="channel"),
        inputs=Quantizer(format="fp8", granularity="token", dynamic=True),
    ),
}

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


class Recipe(BaseModel):
    """A preset, a dialect, and what to leave alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str = Field(default="fp8", description=f"one of {', '.join(PRESETS)}")
    dialect: Dialect = Field(default="modelopt", description="names, scales and JSON of the written checkpoint")
    ignore: tuple[str, ...] = Field(default=(), description="name patterns that stay as they are")
    include: tuple[str, ...] = Field(
        default=(), description="name patterns to quantize although the default ignore list names them"
    )

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, value: str) -> str:
        if value not in PRESETS:
            raise ValueError(f"unknown preset {value!r}; known presets: {', '.join(PRESETS)}")
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

    @property
    def scheme(self) -> Scheme:
        """The scheme of every quantized layer."""
        return PRESETS[self.preset]


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
