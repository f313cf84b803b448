"""Values of weights that a source already stores in FP8 blocks or in MXFP4, row by row. Pure functions on tensors.

The products are those of transformers 5.23 (integrations/finegrained_fp8.py, `Fp8Dequantize`, and
integrations/mxfp4.py, `convert_moe_packed_tensors`), in fp32 and then rounded to the dtype asked for.
"""

import torch
from torch import Tensor

#: Rows and columns of a block in the published FP8 checkpoints.
SIZE = 128
#: The value of each e2m1 code, with the sign of zero.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
        out[start:stop] = codes[start:stop].to(torch.float32).mul_(scale)
        start = stop
    return out


def mxfp4_blocks(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`dtype` [..., groups * 32] values of packed codes uint8 [..., groups, 16] and exponents uint8 [..., groups].

    The low half of a byte is the even column. Rows stay rows: gpt-oss holds its experts the other way round.
    """
    pairs = torch.tensor([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)], device=blocks.device)
    factor = torch.exp2(scales.to(torch.float32) - 127).unsqueeze(-1)
    values = pairs[blocks.to(torch.int32)].flatten(-2).mul_(factor)
    return values.to(dtype).flatten(-2)
