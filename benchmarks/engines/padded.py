"""The demo model with sizes that are multiples of 128, for what comes in blocks and groups of 128.

Zeros are added to hidden states, attention heads and the weights between, so that it computes what the demo model
computes: RMSNorm's mean runs over more values, which its weight and epsilon make up for.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

MULTIPLE = 128
WEIGHTS = "model.safetensors"


def make_padded_model(source: Path, folder: Path) -> Path:
    """Write `folder`, unless it is there; `source` is a Llama with tied embeddings in one file."""
    if folder.exists():
        return folder
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = config.get("head_dim") or hidden // heads
    new_kv_heads = _round_up(kv_heads * head_dim, MULTIPLE) // head_dim
    new_heads = heads // kv_heads * new_kv_heads
    new_hidden = _round_up(hidden, math.lcm(MULTIPLE, new_heads))  # transformers wants a multiple of the heads
    kv, out = (new_kv_heads * head_dim, new_hidden), (new_hidden, new_heads * head_dim)
    shapes = {"q_proj": out[::-1], "k_proj": kv, "v_proj": kv, "o_proj": out, "down_proj": (new_hidden, 0)}
    padded = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        leaf = name.split(".")[-2]
        is_matrix = tensor.ndim == 2
        padded[name] = _pad(tensor, shapes.get(leaf, (0, new_hidden))) if is_matrix else _pad_norm(tensor, new_hidden)
    config |= {
        "hidden_size": new_hidden, "num_attention_heads": new_heads, "num_key_value_heads": new_kv_heads,
        "head_dim": head_dim, "rms_norm_eps": config["rms_norm_eps"] * hidden / new_hidden,
    }  # fmt: skip
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch, ignore=lambda _, names: [WEIGHTS, *(name for name in names if name[0] == ".")])
    (scratch / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(padded, scratch / WEIGHTS, metadata={"format": "pt"})
    return scratch.rename(folder)


def _pad(weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """Zeros behind the rows and columns, up to `shape`; 0 leaves an axis as it is."""
    rows, columns = (max(new - old, 0) for new, old in zip(shape, weight.shape, strict=True))
    return functional.pad(weight, (0, columns, 0, rows))


def _pad_norm(weight: Tensor, size: int) -> Tensor:
    """What is added meets zeros: any number does, and one is a usual one."""
    scaled = (weight.float() * math.sqrt(len(weight) / size)).to(weight.dtype)
    return torch.cat([scaled, scaled.new_ones(size - len(weight))])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
