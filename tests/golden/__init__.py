"""Golden checkpoints; written by tests/oracle/make_goldens.py."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent
WHOLE = "model.safetensors"
CASES = ("llama", "qwen2", "qwen3", "mixtral")


def read_golden(case: str, file: str) -> Any:
    """A golden JSON file, or the tensors of a golden safetensors file by name.

    A whole checkpoint is stored without the tensors that it has from its source as they are; here it has them.
    """
    path = GOLDEN / case / file
    if path.suffix == ".json":
        return json.loads(path.read_text())
    tensors = load_file(path)
    return load_file(GOLDEN / case / "source" / path.name) | tensors if path.name == WHOLE else tensors


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything that a checkpoint says about a tensor: dtype, shape and bytes."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
