"""Second moments of a layer's inputs, H = X^T X, and what a change of its weight costs under them.

A weight [out, in] changed by D moves the outputs on all rows of X by ||X D^T||^2 = trace(D H D^T), so candidates are
compared without running a layer again. Moments of parts of X add up; they are fp32 [in, in], symmetric.

A matrix product may round a row differently when it is computed with other neighbours. What must not depend on how
the rows of a weight are dealt out is therefore multiplied in blocks of exactly `ROWS` rows, the last one filled up
with zeros: a slice of rows that starts at a multiple of `ROWS` gives the bits of the whole.
"""

from collections.abc import Callable

import torch
from torch import Tensor

#: Rows that are multiplied together. Rows are dealt out in whole multiples of it.
ROWS = 64

#: Codes a weight [n, in] of the model's dtype and decodes it again: fp32 [n, in].
Fake = Callable[[Tensor], Tensor]


def second_moments(x: Tensor) -> Tensor:
    """fp32 [in, in] of float inputs [..., in]."""
    flat = x.reshape(-1, x.shape[-1]).to(torch.float32)
    return flat.T @ flat


def check_moments(moments: Tensor, width: int) -> None:
    """Raise ValueError unless these are finite float moments [width, width] with no negative diagonal."""
    if moments.shape != (width, width):
        raise ValueError(
            f"second moments of {width} input features are [{width}, {width}], not {list(moments.shape)}"
        )
    if not bool(torch.isfinite(moments).all()):
        raise ValueError("the second moments of the inputs are not finite: a layer before this one overflowed")
    if bool((moments.diagonal() < 0).any()):
        raise ValueError("the second moments of the inputs have a negative diagonal")


def output_error(delta: Tensor, moments: Tensor) -> Tensor:
    """trace(D H D^T) of a change fp32 [n, in] and moments [in, in]: fp64 0-dim; the sum over slices of rows."""
    total = torch.zeros((), dtype=torch.float64, device=delta.device)
    step = max(ROWS, (1 << 20) // max(1, delta.shape[1]))
    for part in delta.split(step):
        total += ((part @ moments) * part).sum(dtype=torch.float64)
    return total


def diagonal_blocks(moments: Tensor, group: int) -> Tensor:
    """[groups, group, group]: the moments within each group of input features."""
    blocks = moments.unflatten(1, (-1, group)).unflatten(0, (-1, group))
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def in_row_blocks(product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, other: Tensor) -> Tensor:
    """`product(rows, other)` [n, ...] of float rows [n, ...], computed on exactly `ROWS` rows at a time."""
    results = []
    for part in rows.split(ROWS):
        missing = ROWS - part.shape[0]
        whole = torch.cat((part, part.new_zeros(missing, *part.shape[1:]))) if missing else part
        results.append(product(whole, other)[: part.shape[0]])
    return torch.cat(results)
