"""What every number format offers: one protocol for export, verification and the calibration algorithms.

A format codes each block of rows of a weight alone: the same rows give the same bytes whoever codes them, which is
what lets any number of ranks write one checkpoint. Suffixes are the names under which a dialect stores a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranges:
    """Least and largest value that each group of a weight should cover, where an algorithm decides it.

    `low` and `high` are fp32 [rows, groups]; a channel is one group. A symmetric format uses the larger magnitude.
    """

    low: Tensor
    high: Tensor

    @property
    def absmax(self) -> Tensor:
        """fp32 [rows, groups]: the larger magnitude of both ends."""
        return torch.maximum(self.low.abs(), self.high.abs())


@dataclass(frozen=True)
class Grid:
    """Integer codes of a weight: value = (code - zero) * scale, code in [least, most].

    `scale` is fp32 [rows, groups]: what an engine multiplies by, after rounding to the stored dtype. `zero` is
    int8 [rows, groups], None where the format is symmetric.
    """

    scale: Tensor
    zero: Tensor | None
    least: int
    most: int

    def codes(self, x: Tensor, group: int) -> Tensor:
        """int8 codes of float values [rows, k] that lie in one group: nearest, ties to even, saturating."""
        quotient = x.to(torch.float32) / self.scale[:, group, None]
        if self.zero is not None:
            quotient = quotient.round_() + self.zero[:, group, None]
        return quotient.round_().clamp_(self.least, self.most).to(torch.int8)

    def values(self, codes: Tensor, group: int) -> Tensor:
        """fp32 values of int8 codes [rows, k] that lie in one group."""
        offset = codes.to(torch.float32)
        if self.zero is not None:
            offset -= self.zero[:, group, None]
        return offset * self.scale[:, group, None]


class Codec(Protocol):
    """One number format as one dialect stores it. Weights are [out, in]; groups lie along `in`."""

    @property
    def rows_together(self) -> int:
        """Rows that are coded together: a piece starts at a multiple of it (2: row pairs; 128: square blocks)."""
        ...

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """Stored tensors that follow from the whole weight: by suffix; {} when there are none.

        Args:
            absmax: fp32 0-dim, of the whole weight after rounding to `dtype`; may be 0.
            shape: of the weight.
            dtype: the model's dtype.
        """
        ...

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Stored tensors that belong to these rows, by suffix, in their final dtypes and shapes.

        Args:
            rows: finite float [n, in] in the model's dtype; n is a multiple of `rows_together` but at the end.
            values: what `weight_values` returned.
            ranges: used instead of the ranges of `rows`; only where the scale is per channel or group.
            codes: int8 [n, in] to be stored instead of the nearest ones (integer formats only).
        """
        ...

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows: `stored` is what `encode` and `weight_values` gave; `width` is in."""
        ...
