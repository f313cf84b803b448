"""Weights with everything in them that a codec may trip over, the same on every machine."""

import torch

#: Dtypes a weight may have.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def weight(dtype: torch.dtype, rows: int = 37, width: int = 256, seed: int = 1) -> torch.Tensor:
    """[rows, width >= 64]: normal numbers of mixed sizes; groups, rows of zeros of both signs; subnormals; outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x *= 2.0 ** torch.randint(-9, 4, (rows, 1), generator=generator)
    special = (
        torch.zeros(width),
        torch.full((width,), -0.0),
        x[0] * torch.finfo(dtype).smallest_normal / 8,
        torch.where(torch.arange(width) == 7, -3000.0, x[0]),
        torch.where(torch.arange(width) < 48, -0.0, x[0]),
        torch.arange(-width // 2, width - width // 2) / 8,  # many ties
        torch.where(torch.arange(width) % 3 == 0, -torch.finfo(dtype).smallest_normal / 8, 3.0),
        torch.full((width,), torch.finfo(torch.float16).max),
    )
    for row, values in zip(range(1, rows), special, strict=False):
        x[row] = values
    return x.to(dtype)


def absmax(rows: torch.Tensor) -> torch.Tensor:
    """fp32 0-dim, of a whole weight."""
    return rows.abs().max().float()


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, because -0.0 equals 0.0, and NaN nothing."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
