"""Values of weights that a source already stores in FP8 blocks or in MXFP4, row by row. Pure functions on tensors.

The products are those of transformers 5.23 (integrations/finegrained_fp8.py, `Fp8Dequantize`, and
integrations/mxfp4.py, `convert_moe_packed_tensors`), in fp32 and then rounded to the dtype asked for.
"""

import torch
from torch import Tensor

from distribute.numerics import e2m1
from distribute.numerics.fp8 import BLOCK, to_fp32

#: Rows and columns of a block in the published FP8 checkpoints.
SIZE = 128
#: The value of each e2m1 code, with the sign of zero.
SIGNED = (*e2m1.VALUES[:8], *(-value for value in e2m1.VALUES[:8]))


def fp8_blocks(
    codes: Tensor, scale_inv: Tensor, *, first: int = 0, size: int = SIZE, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`dtype` [n, in] values of float8_e4m3fn codes [n, in]: code * scale of its block, in spite of the scale's name.

    Args:
        codes: rows of a weight, from row `first` on.
        scale_inv: float [ceil(out / size), ceil(in / size)], of the whole weight.
    """
    n, width = codes.shape
    out = torch.empty(n, width, dtype=dtype, device=codes.device)
    start = 0
    while start < n:
        stop = min(n, start + size - (first + start) % size)
        scale = scale_inv[(first + start) // size].to(torch.float32).repeat_interleave(size)[:width]
        out[start:stop] = to_fp32(codes[start:stop]).mul_(scale)
        start = stop
    return out


def mxfp4_blocks(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`dtype` [..., groups * 32] values of packed codes uint8 [..., groups, 16] and exponents uint8 [..., groups].

    The low half of a byte is the even column. Rows stay rows: gpt-oss holds its experts the other way round.
    """
    groups = blocks.flatten(0, -2)
    factor = torch.exp2(scales.to(torch.float32) - 127).reshape(-1, 1)
    out = torch.empty(groups.shape[0], 2 * groups.shape[1], dtype=dtype, device=blocks.device)
    step = BLOCK // out.shape[1]
    for start in range(0, groups.shape[0], step):
        part = slice(start, start + step)
        out[part] = e2m1.unpack(groups[part], SIGNED).mul_(factor[part])
    return out.reshape(*blocks.shape[:-2], -1)
