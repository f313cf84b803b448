"""What is tried: the demo model in every preset and dialect, and a few recipes that combine them.

Where blocks or groups are of 128 values, the demo model padded to such sizes is tried, too.

Each checkpoint is made by `nogather run` itself, with a small calibration, into `<home>/checkpoints/<case>`.
"""

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines.padded import make_padded_model
from distribute.dialects.table import DIALECTS
from distribute.errors import UserError
from distribute.scheme import PRESETS
from tasks.demo_model import DemoText

log = logging.getLogger(__name__)

#: The demo model's hidden size, 576, is a multiple of 64 and not of 128, which the presets of int4 have.
GROUP_SIZE = 64
#: Recipes beside the presets.
COMBINED: dict[str, dict[str, Any]] = {
    "fp8, kv_cache: fp8": {"preset": "fp8", "kv_cache": "fp8"},
    "nvfp4, kv_cache: fp8": {"preset": "nvfp4", "kv_cache": "fp8"},
    "int4, symmetric: false": {"preset": "int4", "symmetric": False},
    "nvfp4, down_proj in fp8": {"preset": "nvfp4", "overrides": {"*down_proj": "fp8"}},
}
#: Recipes of the padded model.
PADDED: dict[str, dict[str, Any]] = {
    "fp8_block, padded": {"preset": "fp8_block"},
    "int4, padded": {"preset": "int4"},
    "int4_awq, padded": {"preset": "int4_awq"},
}
SEQUENCE_LENGTH = 512
#: Written last into a published folder.
RECEIPT = "receipt.json"
TIME_LIMIT_S = 1800


@dataclass(frozen=True)
class Case:
    """One checkpoint to make and try. No `dialect`: a bf16 source, against which the others are compared."""

    name: str
    dialect: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    padded: bool = False

    @property
    def key(self) -> str:
        """Names a folder."""
        name = self.name.replace(": ", "-").replace(", ", "+").replace(" ", "-")
        return f"{name}.{self.dialect}" if self.dialect else name

    @property
    def source(self) -> "Case":
        """What it is compared with."""
        return SOURCES[self.padded]


SOURCES = (Case("bf16"), Case("bf16, padded", padded=True))


def all_cases() -> list[Case]:
    """The sources first, then the presets and the combined recipes, each in every dialect."""
    recipes = {preset: {"preset": preset} for preset in PRESETS} | COMBINED
    fitting = [
        Case(name, dialect, _fitting(recipe, dialect)) for name, recipe in recipes.items() for dialect in DIALECTS
    ]
    padded = [Case(name, dialect, recipe, padded=True) for name, recipe in PADDED.items() for dialect in DIALECTS]
    return [*SOURCES, *fitting, *padded]


def _fitting(recipe: dict[str, Any], dialect: str) -> dict[str, Any]:
    """The recipe with a group size that fits the demo model where its format is int4."""
    is_int4 = PRESETS[recipe["preset"]].for_dialect(dialect).weights.format == "int4"
    return recipe | ({"group_size": GROUP_SIZE} if is_int4 else {})


def make_checkpoint(case: Case, model: Path, text: DemoText, home: Path, *, samples: int) -> Path | str | None:
    """The checkpoint's folder; or the message with which this project refuses the recipe; None where it failed."""
    if case.padded:
        model = make_padded_model(model, home / "padded")
    if case in SOURCES:
        return model
    folder, recipe = home / "checkpoints" / case.key, home / "recipes" / f"{case.key}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(json.dumps(case.recipe), encoding="utf-8")  # JSON is YAML
    if (folder / RECEIPT).is_file():
        return folder
    log.info("making %s", case.key)
    options = {
        "--recipe": recipe, "--dialect": case.dialect, "--calib": text.calibration, "--samples": samples,
        "--seq-len": SEQUENCE_LENGTH, "--nproc": 1, "--to": folder, "--workspace": home / "workspace",
    }  # fmt: skip
    command = [str(Path(sys.executable).with_name("nogather")), "run", str(model), "--direct", "--overwrite"]
    made = subprocess.run(
        [*command, *(str(word) for option in options.items() for word in option)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S,
    )  # fmt: skip
    log_file = home / "logs" / f"{case.key}.nogather.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.write_text(made.stdout + made.stderr, encoding="utf-8")
    message = (made.stderr.strip().splitlines() or [f"exit code {made.returncode}"])[-1].removeprefix("error: ")
    if made.returncode == UserError.exit_code:
        return message.replace(str(recipe), "RECIPE")
    if made.returncode != 0:
        log.error("%s was not made: %s; see %s", case.key, message, log_file)
        return None
    return folder
