"""What int8 and int4 share: scales and zero points of groups, and codes. Pure functions on tensors.

A channel is one group. `x` are rows [n, groups, size]; scales are [n, groups].

    modelopt             scale = absmax / (7 or 127) in fp32, the quotient in fp32
                         nvidia-modelopt 0.47, export/quant_utils.py
    compressed-tensors   scale = absmax / (7.5 or 127.5), or (high - low) / 15 with a zero point; scale, quotient
                         and its sum with the zero point are rounded to the model's dtype
                         compressed-tensors 0.20.1, quantization/utils/helpers.py, lifecycle/forward_helpers.py
"""

from collections.abc import Callable

import torch
from torch import Tensor

from distribute.numerics.codec import Grid, Ranges
from distribute.numerics.observers import last_absmax

#: Elements encoded at a time: the fp32 copy of them stays in a core's cache.
BLOCK = 1 << 17
#: The grid of ranges fp32 [n, groups].
GridOf = Callable[[Ranges], Grid]


def limits(bits: int) -> tuple[int, int]:
    """Least and largest code."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def split(rows: Tensor, size: int) -> Tensor:
    """[n, groups, size] of rows [n, in].

    Raises:
        ValueError: the rows are not whole groups.
    """
    if rows.shape[1] % size:
        raise ValueError(f"whole groups of {size} input features are needed, but a row has {rows.shape[1]}")
    return rows.unflatten(1, (rows.shape[1] // size, size))


def symmetric_ranges(groups: Tensor) -> Ranges:
    """fp32 [n, groups]: from the largest magnitude down to its negative."""
    absmax = last_absmax(groups).to(torch.float32)
    return Ranges(-absmax, absmax)


def whole_ranges(groups: Tensor) -> Ranges:
    """fp32 [n, groups]: least and largest value, zero included."""
    low, high = _over_last(torch.minimum, groups), _over_last(torch.maximum, groups)
    return Ranges(low.to(torch.float32).clamp_(max=0.0), high.to(torch.float32).clamp_(min=0.0))


def _over_last(combine: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
    """`combine` over the last axis, by halves: several times faster than a reduction of few elements."""
    while (size := x.shape[-1]) > 1:
        half = (size + 1) // 2
        x = combine(x[..., :half], x[..., size - half :])
    return x.squeeze(-1)


def modelopt_grid(ranges: Ranges, dtype: torch.dtype, bits: int) -> Grid:
    """A range of zero gets scale 1.0; one below the least normal of `dtype` is taken for that."""
    least, most = limits(bits)
    absmax = ranges.absmax
    absmax = torch.where(absmax == 0, torch.full_like(absmax, most), absmax).clamp_(min=torch.finfo(dtype).tiny)
    return Grid(absmax / torch.full_like(absmax, most), None, least, most)


def symmetric_grid(ranges: Ranges, dtype: torch.dtype, bits: int) -> Grid:
    """compressed-tensors' scales; a scale of zero becomes the machine epsilon of `dtype`."""
    least, most = limits(bits)
    absmax = ranges.absmax.to(dtype)
    scale = absmax / torch.full_like(absmax, (most - least) / 2)
    return Grid(_positive(scale).to(torch.float32), None, least, most)


def asymmetric_grid(ranges: Ranges, dtype: torch.dtype, bits: int) -> Grid:
    """compressed-tensors' scales and zero points; the zero point of a range of zero is 0.

    A range wider than the largest number of `dtype`, whose scale is infinite in the reference, is divided first.
    """
    least, most = limits(bits)
    low, high = ranges.low.clamp(max=0.0).to(dtype), ranges.high.clamp(min=0.0).to(dtype)
    steps = torch.full_like(low, most - least)
    scale = (high - low) / steps
    scale = torch.where(scale.isinf(), high / steps - low / steps, scale)
    zero = torch.where(scale == 0, 0.0, least - low / scale)
    return Grid(_positive(scale).to(torch.float32), zero.clamp_(least, most).round_().to(torch.int8), least, most)


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.full_like(scale, torch.finfo(scale.dtype).eps), scale)


def quantize(
    rows: Tensor,
    size: int,
    grid_of: GridOf,
    *,
    symmetric: bool,
    through: torch.dtype,
    ranges: Ranges | None = None,
    codes: Tensor | None = None,
) -> tuple[Tensor, Grid]:
    """Nearest codes int8 [n, in] of rows [n, in] in groups of `size`, and their grid.

    Args:
        through: the dtype to which a quotient, and its sum with the zero point, are rounded.
        ranges: of the groups, where an algorithm decided them.
        codes: int8 [n, in], where an algorithm decided them.

    Raises:
        ValueError: the rows are not whole groups.
    """
    groups, grids = split(rows, size), []
    nearest = torch.empty(rows.shape, dtype=torch.int8, device=rows.device) if codes is None else codes
    measure = symmetric_ranges if symmetric else whole_ranges
    step = max(1, BLOCK // max(1, rows.shape[1]))
    for start in range(0, max(1, rows.shape[0]), step):
        part = slice(start, start + step)
        own = measure(groups[part]) if ranges is None else Ranges(ranges.low[part], ranges.high[part])
        grids.append(grid_of(own))
        if codes is None:
            nearest[part] = _nearest(groups[part], grids[-1], through).flatten(1)
    zeros = [grid.zero for grid in grids if grid.zero is not None]
    scale = torch.cat([grid.scale for grid in grids])
    return nearest, Grid(scale, torch.cat(zeros) if zeros else None, grids[0].least, grids[0].most)


def _nearest(groups: Tensor, grid: Grid, through: torch.dtype) -> Tensor:
    """fp32, because arithmetic on halves is slow on a CPU; every step is rounded to `through`."""
    quotient = groups.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    quotient = quotient.div_(grid.scale[:, :, None]).to(through).to(torch.float32)
    if grid.zero is not None:
        quotient = quotient.add_(grid.zero[:, :, None]).to(through).to(torch.float32)
    return quotient.round_().clamp_(grid.least, grid.most)


def values_of(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """fp32 [n, in] values of int8 codes [n, in], scales and zero points [n, groups]."""
    groups = codes.to(torch.float32).unflatten(1, (scale.shape[1], -1))
    if zero is not None:
        groups -= zero[:, :, None]
    return groups.mul_(scale.to(torch.float32)[:, :, None]).flatten(1)
