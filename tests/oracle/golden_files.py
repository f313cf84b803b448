"""Where the golden files lie and how they are written. What equals the source is left out, to keep them small."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.golden import GOLDEN, raw


def source_tensors(case: str) -> dict[str, torch.Tensor]:
    """The bf16 weights of a case by name."""
    return load_file(GOLDEN / case / "source" / "model.safetensors")


def calibration_batch(case: str) -> torch.Tensor:
    """Token ids [4, 24]."""
    return torch.tensor(json.loads((GOLDEN / case / "calibration.json").read_text())["input_ids"])


def empty(folder: Path) -> Path:
    """The folder with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def write_changed(case: str, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors that the source does not have with the same dtype, shape and bytes."""
    source = source_tensors(case)
    assert source.keys() <= tensors.keys(), "one that is gone could not be told from one that is equal"
    save_file({name: t for name, t in tensors.items() if name not in source or raw(t) != raw(source[name])}, path)
