"""A number format small enough to be seen through: int4 codes, a scale per group in the model's dtype."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.numerics.codec import Grid, Ranges
from distribute.numerics.search import group_ranges

GROUP = 32


@dataclass(frozen=True)
class ToyCodec:
    rows_together: int = 2

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        return {}

    def grid(self, ranges: Ranges, dtype: torch.dtype) -> Grid:
        scale = (ranges.absmax / 7).to(dtype).float()
        return Grid(torch.where(scale > 0, scale, torch.ones_like(scale)), None, -8, 7)

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        ranges = ranges or group_ranges(rows, GROUP)
        grid = self.grid(ranges, rows.dtype)
        if codes is None:
            parts = rows.split(rows.shape[1] // ranges.low.shape[1], dim=1)
            codes = torch.cat([grid.codes(part, index) for index, part in enumerate(parts)], dim=1)
        return {"weight": codes, "weight_scale": grid.scale}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        return stored["weight"].float() * stored["weight_scale"].repeat_interleave(
            width // stored["weight_scale"].shape[1], dim=1
        )


def find_toy_codec(key: str) -> ToyCodec:
    """Stands for `distribute.numerics.table.find_codec`."""
    return ToyCodec()
