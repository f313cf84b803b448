"""Int8 with a scale a row, in both dialects: value = code * scale.

    modelopt                     weight int8 [out, in]; weight_scale fp32 [out]
    compressed-tensors           weight int8 [out, in]; weight_scale [out, 1] in the model's dtype
    compressed-tensors, packed   weight_packed int32 [out, in / 4] and weight_shape: of weight-only layers

A row of zeros gets scale 1.0 in modelopt, and the machine epsilon of the dtype in compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distribute.numerics import integers, packing
from distribute.numerics.codec import Grid, Ranges

BITS = 8


@dataclass(frozen=True)
class Int8:
    """One dialect's int8. `packed`: codes in 32-bit words."""

    modelopt: bool
    packed: bool = False
    rows_together: ClassVar[int] = 1

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """`weight_shape` int64 [2] of packed codes."""
        return {"weight_shape": torch.tensor(shape)} if self.packed else {}

    def grid(self, ranges: Ranges, dtype: torch.dtype) -> Grid:
        """Codes under ranges [n, 1]."""
        return (integers.modelopt_grid if self.modelopt else integers.symmetric_grid)(ranges, dtype, BITS)

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Codes and scales of rows [n, in]."""
        codes, grid = integers.quantize(
            rows,
            rows.shape[1],
            lambda own: self.grid(own, rows.dtype),
            symmetric=True,
            through=torch.float32 if self.modelopt else rows.dtype,
            ranges=ranges,
            codes=codes,
        )
        if self.modelopt:
            return {"weight": codes, "weight_scale": grid.scale.flatten()}
        scale = grid.scale.to(rows.dtype)
        if self.packed:
            return {"weight_packed": packing.pack_words(codes, BITS), "weight_scale": scale}
        return {"weight": codes, "weight_scale": scale}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows."""
        codes = packing.unpack_words(stored["weight_packed"], BITS, width) if self.packed else stored["weight"]
        return integers.values_of(codes, stored["weight_scale"].reshape(-1, 1), None)


def modelopt_input_values(absmax: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """`input_scale` fp32 0-dim: absmax / 127; 1.0 for inputs that never moved."""
    absmax = absmax.reshape(1, 1)
    return {"input_scale": integers.modelopt_grid(Ranges(-absmax, absmax), torch.float32, BITS).scale.reshape(())}


#: Every codec by the name that the dialects use.
CODECS: dict[str, Int8] = {
    "int8.modelopt.channel": Int8(True),
    "int8.compressed-tensors.channel": Int8(False),
    "int8_packed.compressed-tensors.channel": Int8(False, packed=True),
}
