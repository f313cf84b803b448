"""What is measured of weights and activations: absmax and non-finite values. Pure functions on tensors.

An absmax is exact in every float dtype, so it is returned in fp32, and `torch.maximum` merges it in any order
and grouping to the same bits. NaN propagates into it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements looked at together: their copies stay in a core's cache.
BLOCK = 1 << 18


@dataclass(frozen=True)
class NonFinite:
    """How many elements of a tensor are not finite, and where the first is."""

    nan: int
    inf: int
    first: tuple[int, ...] | None


def absmax(x: Tensor) -> Tensor:
    """Largest magnitude of a float tensor of any shape: fp32 0-dim; 0 for an empty tensor. One pass, no copy."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).to(torch.float32)


def rows_absmax(weight: Tensor) -> Tensor:
    """Largest magnitude of every row of a float weight [rows, in]: fp32 [rows]; 0 where `in` is 0."""
    out = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
    step = max(1, BLOCK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0] if weight.shape[1] else 0, step):
        out[start : start + step] = weight[start : start + step].abs().amax(dim=1)
    return out


def last_absmax(x: Tensor) -> Tensor:
    """`x.abs().amax(-1)`: largest magnitude along the last axis, not empty. Twice as fast on few elements."""
    x = x.abs()
    while (size := x.shape[-1]) > 1:
        half = (size + 1) // 2
        x = torch.maximum(x[..., :half], x[..., size - half :])
    return x.squeeze(-1)


def merge(a: Tensor, b: Tensor) -> Tensor:
    """The absmax of what two absmax tensors of equal shape were measured on: associative, commutative, exact."""
    return torch.maximum(a, b)


def count_nonfinite(x: Tensor) -> NonFinite:
    """NaN and Inf in a float tensor, and the index of the first in row-major order. Fast when there are none."""
    if bool(absmax(x).isfinite()):
        return NonFinite(0, 0, None)
    bad = ~torch.isfinite(x)
    first = tuple(int(i) for i in bad.nonzero()[0])
    nan = int(torch.isnan(x).sum())
    return NonFinite(nan, int(bad.sum()) - nan, first)
