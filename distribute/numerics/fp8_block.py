"""FP8 (e4m3) in square blocks of 128 rows and 128 columns, each with a scale: value = code * scale of its block.

    modelopt             weight_scale fp32 [row blocks, 1, column blocks, 1]; the quotient is kept in fp32
                                                        nvidia-modelopt 0.47, quantization/qtensor/fp8_tensor.py
    compressed-tensors   weight_scale [row blocks, column blocks] and the quotient in the model's dtype
                                 compressed-tensors 0.20.1, quantization/utils/helpers.py, compressors/naive_quantized

The last block of a row or a column may be smaller. (Of a weight that is one block, modelopt stores the scale without
axes: the same four bytes.) A block of zeros gets scale 1.0 in modelopt, and the machine
epsilon of the dtype in compressed-tensors, also where the whole weight is zero.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from distribute.numerics import fp8
from distribute.numerics.codec import Ranges
from distribute.numerics.observers import last_absmax

SIZE = 128
#: Columns encoded at a time, in the rows of one block: `fp8.BLOCK` elements.
COLUMNS = fp8.BLOCK // SIZE


@dataclass(frozen=True)
class Fp8Block:
    """The blocks of one dialect.

    `scale(absmax, dtype)`: stored scales, in their dtype, of the fp32 absmax of blocks and the model's dtype.
    `modelopt`: scales have four axes, quotients are kept in fp32, and -0.0 keeps its sign.
    """

    scale: Callable[[Tensor, torch.dtype], Tensor]
    modelopt: bool
    rows_together: ClassVar[int] = SIZE

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """Nothing follows from the whole weight."""
        return {}

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`weight` float8_e4m3fn [n, in], and `weight_scale` of the blocks that begin at the first row."""
        assert ranges is None
        assert codes is None
        n, width = rows.shape
        out = torch.empty(n, width, dtype=fp8.E4M3, device=rows.device)
        absmax = torch.zeros(ceil(n / SIZE), ceil(width / SIZE), dtype=torch.float32, device=rows.device)
        scale = self.scale(absmax, rows.dtype)
        for i in range(scale.shape[0]):
            for j in range(0, width, COLUMNS):
                at = slice(i * SIZE, (i + 1) * SIZE), slice(j, j + COLUMNS)
                blocks = slice(j // SIZE, (j + COLUMNS) // SIZE)
                scale[i, blocks] = self.scale(_blocks_absmax(rows[at]), rows.dtype)
                out[at] = self._codes(rows[at], scale[i, blocks])
        return {"weight": out, "weight_scale": scale[:, None, :, None] if self.modelopt else scale}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows, the first of which begins a block."""
        codes, scale = stored["weight"], stored["weight_scale"]
        scale = scale.reshape(ceil(codes.shape[0] / SIZE), ceil(width / SIZE)).to(torch.float32)
        values = fp8.to_fp32(codes)
        for i, of_blocks in enumerate(scale):
            values[i * SIZE : (i + 1) * SIZE].mul_(_each_column(of_blocks, width))
        return values

    def _codes(self, part: Tensor, scale: Tensor) -> Tensor:
        quotient = part.to(torch.float32, copy=True)
        quotient.div_(_each_column(scale.to(torch.float32), part.shape[1]))
        if not self.modelopt:
            quotient = quotient.to(part.dtype).add_(0.0)  # adding a zero point of 0 makes -0 a +0
        return quotient.clamp_(-fp8.E4M3_MAX, fp8.E4M3_MAX)


def _each_column(scale: Tensor, width: int) -> Tensor:
    """The scale of each of `width` columns, of the scales of their blocks."""
    return scale.repeat_interleave(SIZE)[:width]


def _blocks_absmax(part: Tensor) -> Tensor:
    """fp32 [column blocks]: largest magnitudes of rows that lie in one row of blocks."""
    columns = part.abs().amax(dim=0)
    whole = columns.new_zeros(ceil(columns.numel() / SIZE) * SIZE)
    whole[: columns.numel()] = columns
    return last_absmax(whole.unflatten(0, (-1, SIZE))).to(torch.float32)


#: Every codec by the name that the dialects use.
CODECS: dict[str, Fp8Block] = {
    "fp8_block.modelopt.128": Fp8Block(fp8.guarded_scale, True),
    "fp8_block.compressed-tensors.128": Fp8Block(fp8.epsilon_scale, False),
}
