"""NVFP4 arithmetic: e2m1 codes in groups along a row, an e4m3 scale a group, an fp32 scale a weight. Pure functions.

The formulas and the dtypes of nvidia-modelopt 0.47 for dynamic blocks (quantization/qtensor/nvfp4_tensor.py,
export/quant_utils.py), and its bytes. Every row is coded alone, so any subset of rows gives the bytes of the whole.

    value = code * group scale * scale_2      code: 0, .5, 1, 1.5, 2, 3, 4, 6 and the sign, nearest, ties to even

Every scale is finite and > 0. An all-zero weight, for which the reference writes NaN, gets scale_2 1.0, group scales
1.0 and zero codes.
"""

import torch
from torch import Tensor

from distribute.numerics import e2m1
from distribute.numerics.observers import last_absmax

E4M3_MIN, E4M3_MAX = 2.0**-9, 448.0
GROUP_SIZE = 16
#: Elements encoded at a time: the fp32 copies of them stay in a core's cache.
BLOCK = 1 << 18


def scale_2(absmax: Tensor) -> Tensor:
    """The scale of a whole weight: fp32, shaped as its absmax (0-dim, or one for each expert).

    1.0 where the absmax is 0, or so small that the scale would be 0.
    """
    scale = _over_both_maxima(absmax)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def input_scale(absmax: Tensor) -> Tensor:
    """The scale of the inputs of a layer: fp32 0-dim; 1 / 448, as if of 6.0, where they never moved (0 or NaN)."""
    scale = _over_both_maxima(absmax.reshape(()))
    return torch.where(scale > 0, scale, _over_both_maxima(torch.full_like(scale, e2m1.MAX)))


def encode(
    rows: Tensor, scale_2: Tensor, *, dtype: torch.dtype, group_size: int = GROUP_SIZE
) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n, in / 2] and group scales float8_e4m3fn [n, in / group_size] of finite float rows [n, in].

    The even column of a pair is in the low half of a byte. A value beyond the largest code saturates.

    Args:
        scale_2: fp32; 0-dim, or [n] where the rows belong to several weights.
        dtype: the model's dtype. Rows are rounded to it before they are coded, but not for the group scales.
        group_size: columns that share a scale; even.

    Raises:
        ValueError: the rows are not whole groups.
    """
    n, width = rows.shape
    if width % group_size:
        raise ValueError(f"NVFP4 needs whole groups of {group_size} input features, but a row has {width}")
    groups = rows.unflatten(1, (width // group_size, group_size))
    per_row = scale_2.reshape(-1, 1).expand(n, 1)
    codes = torch.empty(n, width // 2, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(groups.shape[:2], dtype=torch.float8_e4m3fn, device=rows.device)
    step = max(1, BLOCK // max(1, width))
    for start in range(0, n if width else 0, step):
        part = slice(start, start + step)
        scales[part] = _group_scales(groups[part], per_row[part])
        quotient = groups[part].to(dtype).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        quotient.div_(_divisor(scales[part], per_row[part]))
        codes[part] = e2m1.pack(e2m1.nearest(quotient.flatten(1)))
    return codes, scales


def decode(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Tensor:
    """fp32 [n, in] values of codes uint8 [n, in / 2], their group scales [n, groups] and scale_2 (0-dim or [n])."""
    groups = e2m1.unpack(codes).unflatten(1, (scales.shape[1], -1))
    return groups.mul_(_divisor(scales, scale_2.reshape(-1, 1))).flatten(1)


def _over_both_maxima(absmax: Tensor) -> Tensor:
    # A tensor divisor, not a Python number: CUDA multiplies by the reciprocal of a number, which rounds differently.
    absmax = absmax.to(torch.float32)
    return absmax / torch.full_like(absmax, e2m1.MAX * E4M3_MAX)


def _group_scales(groups: Tensor, scale_2: Tensor) -> Tensor:
    """float8_e4m3fn [n, groups] of [n, groups, size] and scale_2 [n, 1]. A group of zeros gets 1.0."""
    scale = last_absmax(groups).to(torch.float32) / (scale_2 * e2m1.MAX)
    return scale.masked_fill_(scale == 0, 1.0).clamp_(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)


def _divisor(scales: Tensor, scale_2: Tensor) -> Tensor:
    """fp32 [n, groups, 1]: the rounded group scales times scale_2 [n, 1]."""
    # The product of two tiny scales can vanish, and 0 / 0 has no code.
    return (scales.to(torch.float32) * scale_2).clamp_(min=2.0**-149).unsqueeze(-1)
