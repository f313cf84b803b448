"""Four-bit grids and inputs whose features are correlated, for tests of the algorithms."""

import torch

from distribute.numerics.codec import Grid, Ranges
from distribute.numerics.search import group_ranges


def symmetric(ranges: Ranges) -> Grid:
    scale = ranges.absmax / 7.2  # not 7.5, which would put the largest weight of every group on a tie
    return Grid(torch.where(scale == 0, torch.ones_like(scale), scale), None, -8, 7)


def asymmetric(ranges: Ranges) -> Grid:
    scale = (ranges.high - ranges.low) / 15
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return Grid(scale, (-8 - ranges.low / scale).round().clamp(-8, 7).to(torch.int8), -8, 7)


def decoded(codes: torch.Tensor, grid: Grid, group: int) -> torch.Tensor:
    """fp32 [n, in] of codes [n, in]."""
    parts = codes.split(group, dim=1)
    return torch.cat([grid.values(part, index) for index, part in enumerate(parts)], dim=1)


def nearest_codes(rows: torch.Tensor, grid: Grid, group: int) -> torch.Tensor:
    return torch.cat([grid.codes(part, index) for index, part in enumerate(rows.split(group, dim=1))], dim=1)


def fake_in_ranges(rows: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    grid, group = symmetric(ranges), rows.shape[1] // ranges.low.shape[1]
    return decoded(nearest_codes(rows, grid, group), grid, group)


def fake(group: int):
    """Codes and decodes to the nearest under the largest magnitude of each group."""
    return lambda rows: fake_in_ranges(rows, group_ranges(rows, group))


def weights(n: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, width, generator=generator) * torch.rand(width, generator=generator)).to(dtype)


def inputs(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """fp32 [tokens, width]: features of unlike size that move together."""
    generator = torch.Generator().manual_seed(seed + 1000)
    mix = torch.randn(width, width, generator=generator) / width**0.5 + 0.2 * torch.eye(width)
    size = torch.rand(width, generator=generator).pow(3) * 5 + 0.05
    return torch.randn(tokens, width, generator=generator) @ mix * size
