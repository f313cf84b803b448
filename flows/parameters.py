"""What a user asks for: one flat model, which is the command line's options and the form in Prefect's UI.

Empty text means "not given": the UI has no good way to enter null.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from distribute.errors import RecipeError
from distribute.recipe import Recipe, load_recipe
from distribute.sizes import parse_size
from infra.redact import carries_secret
from infra.settings import load_settings


class Parameters(BaseModel):
    """Parameters of the flow `quantize-model`."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, hide_input_in_errors=True)

    model: str = Field(
        min_length=1, description="folder of a Hugging Face checkpoint, or org/name[@revision] on the Hub"
    )
    recipe: str = Field(default="fp8", min_length=1, description="preset, like fp8, or path of a YAML file")
    dialect: Literal["recipe", "modelopt", "compressed-tensors"] = Field(
        default="recipe", description="names, scales and JSON of the checkpoint; recipe: as the recipe says"
    )
    bits: float = Field(
        default=0, ge=0, le=32, description="mean bits of a weight: choose the presets by measurement; 0: do not"
    )
    target: str = Field(
        default="",
        description="where to publish: a folder, s3://bucket/prefix or hf://org/name; empty: nowhere",
    )
    overwrite: bool = Field(default=False, description="publish although the target holds other files")
    calib: str = Field(
        default="",
        description="calibration text: .txt, .jsonl or .parquet file, or hf://datasets/org/name[:split]",
    )
    samples: int = Field(default=512, ge=1, description="calibration samples")
    sequence_length: int = Field(default=512, ge=1, description="tokens of each sample")
    batch_size: int = Field(default=8, ge=1, description="samples computed at once")
    seed: int = Field(default=0, ge=0, description="chooses the samples")
    nproc: int = Field(
        default=0, ge=0, le=1024, description="ranks on this host; 0: one a GPU, else one a CPU core up to 2"
    )
    max_shard_size: str = Field(default="5GB", description="largest weight file, for example 5GB or 500MB")
    workspace: str = Field(
        default="", description="folder for stages and reports; empty: NOGATHER_WORKSPACE or the cache"
    )
    fail_on_unrouted_experts: bool = Field(
        default=False,
        description="fail when an expert saw no calibration token, instead of using its siblings' range",
    )
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model")

    @field_validator("max_shard_size")
    @classmethod
    def _is_size(cls, value: str) -> str:
        parse_size(value)
        return value

    @field_validator("model", "target", "calib")
    @classmethod
    def _holds_no_secret(cls, value: str) -> str:
        """Prefect keeps and shows the parameters of every run."""
        if carries_secret(value):
            raise ValueError("holds credentials or a query; give the bare address, and pass secrets by environment")
        return value

    def workspace_folder(self) -> Path:
        """The given workspace, or the one of this machine's settings."""
        return Path(self.workspace) if self.workspace else load_settings().workspace

    def load_recipe(self) -> Recipe:
        """The recipe with the dialect and the budget on top.

        Raises:
            RecipeError: there is no such recipe, or it is wrong.
        """
        dialect = None if self.dialect == "recipe" else self.dialect
        recipe = load_recipe(self.recipe, dialect=dialect)
        if not self.bits:
            return recipe
        known = recipe.auto.model_dump() if recipe.auto else {}
        return load_recipe(self.recipe, dialect=dialect, auto=known | {"bits": self.bits})


def make_parameters(**values: Any) -> Parameters:
    """Parameters from what was given; None means not given.

    Raises:
        RecipeError: one sentence that names every wrong option.
    """
    try:
        return Parameters(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        raise RecipeError("; ".join(map(_fault, error.errors()))) from None


def _fault(fault: Any) -> str:
    name = ".".join(map(str, fault["loc"])).replace("_", "-")
    shown = "" if fault["msg"].startswith("Value error, holds credentials") else f" {fault['input']!r}"
    return f"{name}{shown}: {fault['msg'].removeprefix('Value error, ')}"
