"""Tensors that all ranks need: sums of what each has, and the union of what each has made.

They travel over the control group, so that a rank that failed is heard of instead of waited for. Sums are made in
fp64 in the order of ranks. Every function here is called by all ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from safetensors.torch import load, save
from torch import Tensor

from distribute.ranks import Ranks

#: Elements that are summed at once: bounds the copies.
PIECE = 1 << 24


def summed(parts: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The sum over ranks of each tensor, fp64 on the CPU; a rank that lacks a name adds nothing to it."""
    shapes: dict[str, list[int]] = {}
    for own in ranks.control.exchange("shapes", {name: list(part.shape) for name, part in parts.items()}).values():
        shapes |= own
    sums = {}
    for name in sorted(shapes):
        total = (
            parts[name].to("cpu", torch.float64, copy=True) if name in parts else torch.zeros(shapes[name]).double()
        )
        for piece in total.view(-1).split(PIECE) if ranks.world > 1 else ():
            _sum_in_place(piece, ranks)
        sums[name] = total
    return sums


def united(own: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Every rank's tensors on all ranks, on the CPU. A name that several ranks give is that of the last."""
    if ranks.world == 1:
        return {name: tensor.cpu() for name, tensor in own.items()}
    data = _bytes(
        torch.frombuffer(bytearray(save({n: t.cpu().contiguous() for n, t in own.items()})), dtype=torch.uint8)
    )
    sizes = ranks.control.exchange("sizes", len(data))
    received = {rank: torch.empty(size, dtype=torch.uint8) for rank, size in sizes.items()}
    ranks.control.transfer("tensors", dict.fromkeys(sizes, data), received)
    return {
        name: tensor for rank in sorted(received) for name, tensor in load(received[rank].numpy().tobytes()).items()
    }


def _sum_in_place(piece: Tensor, ranks: Ranks) -> None:
    """Each rank sums one share of the piece, and gives it to all others."""
    bounds = [len(piece) * rank // ranks.world for rank in range(ranks.world + 1)]
    shares = [piece[begin:end] for begin, end in pairwise(bounds)]
    mine = [torch.empty_like(shares[ranks.rank]) for _ in shares]
    _transfer(ranks, shares, mine)
    total = mine[0]
    for part in mine[1:]:
        total += part
    _transfer(ranks, [total] * ranks.world, shares)


def _transfer(ranks: Ranks, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
    sides = [{rank: _bytes(tensor) for rank, tensor in enumerate(side)} for side in (sends, receives)]
    ranks.control.transfer("sums", sides[0], sides[1])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
