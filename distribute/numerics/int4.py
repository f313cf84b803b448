"""Int4 in groups along a row, in both dialects: value = (code - zero point) * scale.

    modelopt             weight uint8 [out / 2, in]: pairs of rows; weight_scale fp32 [out, in / group]
    modelopt, W4A8       the same, and weight_scale_2 fp32 0-dim: absmax of the whole weight / 448, for FP8 inside
    compressed-tensors   weight_packed int32 [out, in / 8], weight_scale [out, in / group] in the model's dtype,
                         weight_shape; weight_zero_point int32 [out / 8, in / group] where there is one

A group of zeros gets scale 1.0 in modelopt, and the machine epsilon of the dtype in compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distribute.numerics import fp8, integers, packing
from distribute.numerics.codec import Grid, Ranges

BITS = 4
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class ModelOptInt4:
    """`twice`: W4A8."""

    group_size: int
    twice: bool = False
    rows_together: ClassVar[int] = 2

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """`weight_scale_2` of W4A8."""
        return {"weight_scale_2": fp8.guarded_scale(absmax.reshape(()), dtype)} if self.twice else {}

    def grid(self, ranges: Ranges, dtype: torch.dtype) -> Grid:
        """Codes under ranges [n, groups]."""
        return integers.modelopt_grid(ranges, dtype, BITS)

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Codes and scales of rows [n, in], n even."""
        codes, grid = integers.quantize(
            rows,
            self.group_size,
            lambda own: self.grid(own, rows.dtype),
            symmetric=True,
            through=torch.float32,
            ranges=ranges,
            codes=codes,
        )
        return {"weight": packing.pack_row_pairs(codes), "weight_scale": grid.scale}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows."""
        return integers.values_of(packing.unpack_row_pairs(stored["weight"]), stored["weight_scale"], None)


@dataclass(frozen=True)
class CompressedTensorsInt4:
    """`symmetric`: without zero points."""

    group_size: int
    symmetric: bool = True

    @property
    def rows_together(self) -> int:
        """Zero points of eight rows share a word."""
        return 1 if self.symmetric else 32 // BITS

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """`weight_shape` int64 [2]."""
        return {"weight_shape": torch.tensor(shape)}

    def grid(self, ranges: Ranges, dtype: torch.dtype) -> Grid:
        """Codes under ranges [n, groups]."""
        return (integers.symmetric_grid if self.symmetric else integers.asymmetric_grid)(ranges, dtype, BITS)

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Codes, scales and zero points of rows [n, in]."""
        codes, grid = integers.quantize(
            rows,
            self.group_size,
            lambda own: self.grid(own, rows.dtype),
            symmetric=self.symmetric,
            through=rows.dtype,
            ranges=ranges,
            codes=codes,
        )
        stored = {"weight_packed": packing.pack_words(codes, BITS), "weight_scale": grid.scale.to(rows.dtype)}
        if grid.zero is not None:
            stored["weight_zero_point"] = packing.pack_words(grid.zero.T.contiguous(), BITS).T.contiguous()
        return stored

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows."""
        codes = packing.unpack_words(stored["weight_packed"], BITS, width)
        zero = None
        if not self.symmetric:
            zero = packing.unpack_words(stored["weight_zero_point"].T, BITS, codes.shape[0]).T
        return integers.values_of(codes, stored["weight_scale"], zero)


#: Every codec by the name that the dialects use.
CODECS: dict[str, ModelOptInt4 | CompressedTensorsInt4] = {
    **{f"int4.modelopt.{size}": ModelOptInt4(size) for size in GROUP_SIZES},
    **{f"w4a8.modelopt.{size}": ModelOptInt4(size, twice=True) for size in GROUP_SIZES},
    **{f"int4.compressed-tensors.{size}": CompressedTensorsInt4(size) for size in GROUP_SIZES},
    **{f"int4.compressed-tensors.{size}.asymmetric": CompressedTensorsInt4(size, False) for size in GROUP_SIZES},
}
