"""A small model whose export takes every step, what it must become, and how to look at a folder that holds it.

Two layers of it have FP8 quantizers, of which one has no absmax, and the K/V cache has scales; the placement "mixed"
adds replicas and tensors that are cut across their rows.
"""

from pathlib import Path

import torch

from distribute import distributed_save_hf_checkpoint
from distribute.shards import sha256
from tests.distribute.live.stand_ins import FP8, Quantizer
from tests.live_models import make_live, place

README = "README.md"  # the user's own


class QuantLinear(torch.nn.Linear):
    """Not a plain one, for those who look at the type."""


def make_model(seed: int) -> torch.nn.Module:
    model = make_live("llama", seed=seed, num_hidden_layers=1)
    attention = model.model.layers[0].self_attn
    for layer, amax in ((attention.q_proj, None), (attention.o_proj, 1.0)):
        layer.__class__ = QuantLinear
        layer.weight_quantizer, layer.input_quantizer = Quantizer(**FP8, amax=amax), Quantizer(**FP8, amax=1.0)
    attention.k_bmm_quantizer, attention.v_bmm_quantizer = Quantizer(**FP8, amax=2.0), Quantizer(**FP8, amax=3.0)
    return model


def save(out: Path, seed: int, placement: str = "plain", world: int = 1) -> None:
    """Called by all ranks."""
    model = make_model(seed)
    place(model, placement, world)
    distributed_save_hf_checkpoint(model, out, 448.0, "FP8", "8KB")


def make_checkpoint(folder: Path, seed: int) -> dict[str, str]:
    """Save alone, with a file of the user's beside; returns the digests."""
    save(folder, seed)
    (folder / README).write_text("mine")
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """Of all that a reader of a checkpoint sees; hidden names are none of it."""
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.name[0] != "." and path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
