"""Golden checkpoints; written by tests/oracle/make_goldens.py."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent
CASES = ("llama", "qwen2", "qwen3", "mixtral")


def read_golden(case: str, file: str) -> Any:
    """A golden JSON file, or the tensors of a golden safetensors file by name."""
    path = GOLDEN / case / file
    return load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything that a checkpoint says about a tensor: dtype, shape and bytes."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
