"""MXFP4 and MXFP8: codes in groups of 32 along a row that share a power of two, stored as its exponent + 127 (e8m0).

    value = code * 2 ** (scale byte - 127)        code: e2m1, two a byte, or e4m3

The dialects choose the exponent and round by different rules, which one table, `CODECS`, puts together:

    modelopt             the least exponent under which the largest code covers the group; quotients in fp32; in
                         MXFP4 ties go down and zeros are negative   nvidia-modelopt 0.47, quantization/qtensor/mxfp*
    compressed-tensors   the group's largest magnitude rounded to a power of two, up from 1.75 times one, over the
                         largest code's; quotients in the model's dtype
                                       compressed-tensors 0.20.1, quantization/utils/mxfp_utils.py, compressors/mxfp*

A scale byte is never 255, which is NaN. (compressed-tensors comes to it where rounding up leaves the dtype: above
57344 in fp16. Here it is the next exponent.) A group of zeros gets byte 0, the least scale; in fp16, which has no
such number, compressed-tensors writes 127.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distribute.numerics import e2m1
from distribute.numerics.codec import Ranges
from distribute.numerics.fp8 import E4M3, E4M3_MAX, to_fp32
from distribute.numerics.observers import last_absmax

GROUP_SIZE = 32
BIAS = 127
#: Elements encoded at a time: the fp32 copies of them stay in a core's cache.
BLOCK = 1 << 18
#: Bits of the mantissa and bias of the exponent of the dtypes a weight may have, and an integer of the same width.
LAYOUTS = {
    torch.bfloat16: (7, 127, torch.int16),
    torch.float16: (10, 15, torch.int16),
    torch.float32: (23, 127, torch.int32),
}


@dataclass(frozen=True)
class Element:
    """What a group is made of: its `largest` code, its tensor. `code` overwrites fp32 quotients [n, in]."""

    largest: float
    suffix: str
    dtype: torch.dtype
    code: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MxCodec:
    """One of both formats in one dialect.

    `exponents(absmax, largest)`: int32 scale bytes of the absmax of groups in the model's dtype.
    `quotients(groups, bytes)`: fp32 [n, groups, 32] / 2 ** (bytes [n, groups] - 127).
    """

    element: Element
    exponents: Callable[[Tensor, float], Tensor]
    quotients: Callable[[Tensor, Tensor], Tensor]
    rows_together: ClassVar[int] = 1

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """Nothing follows from the whole weight."""
        return {}

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The element's tensor and `weight_scale` uint8 [n, in / 32].

        Raises:
            ValueError: the rows are not whole groups.
        """
        assert ranges is None
        assert codes is None
        n, width = rows.shape
        if width % GROUP_SIZE:
            raise ValueError(f"MX formats need whole groups of {GROUP_SIZE} input features, but a row has {width}")
        groups = rows.unflatten(1, (width // GROUP_SIZE, GROUP_SIZE))
        scales = torch.empty(groups.shape[:2], dtype=torch.uint8, device=rows.device)
        per_byte = 2 if self.element.dtype == torch.uint8 else 1
        out = torch.empty(n, width // per_byte, dtype=self.element.dtype, device=rows.device)
        step = max(1, BLOCK // max(1, width))
        for start in range(0, n if width else 0, step):
            part = slice(start, start + step)
            exponents = self.exponents(last_absmax(groups[part]), self.element.largest)
            scales[part] = exponents
            out[part] = self.element.code(self.quotients(groups[part], exponents).flatten(1))
        return {self.element.suffix: out, "weight_scale": scales}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows."""
        scales = stored["weight_scale"]
        groups = self.element.values(stored[self.element.suffix]).unflatten(1, (scales.shape[1], GROUP_SIZE))
        return groups.mul_(_power(scales.to(torch.int32) - BIAS)).flatten(1)


def _covering(absmax: Tensor, largest: float) -> Tensor:
    """Bytes of the least exponents with largest * 2 ** exponent >= absmax.

    The reference takes ceil(log2(x)) in fp32, where the logarithm of what is just above a power of two is whole. In
    fp64 and then rounded it is the same on every device and at every place in a tensor.
    """
    absmax = absmax.to(torch.float32)
    x = absmax / torch.full_like(absmax, largest)
    exponents = x.to(torch.float64).log2_().to(torch.float32).ceil_()
    return exponents.clamp_(min=-BIAS).to(torch.int32) + BIAS


def _nearest_power(absmax: Tensor, largest: float) -> Tensor:
    """Bytes of the exponent of absmax, plus one from 1.75 times a power of two, less that of the largest code."""
    mantissa, bias, integer = LAYOUTS[absmax.dtype]
    exponents = absmax.view(integer).to(torch.int32).add_(1 << (mantissa - 2)).bitwise_right_shift_(mantissa)
    offset = math.frexp(largest)[1] - 1
    least = BIAS if absmax.dtype == torch.float16 else 0  # of groups below the dtype's normal numbers
    return torch.where(exponents == 0, least, (exponents + (BIAS - bias - offset)).clamp_(min=0))


def _in_fp32(groups: Tensor, exponents: Tensor) -> Tensor:
    return groups.to(torch.float32, copy=True, memory_format=torch.contiguous_format).mul_(_power(BIAS - exponents))


def _in_dtype(groups: Tensor, exponents: Tensor) -> Tensor:
    return groups.div(_power(exponents - BIAS).to(groups.dtype)).to(torch.float32).contiguous()


def _power(exponents: Tensor) -> Tensor:
    """fp32 [n, groups, 1]: exactly 2 ** exponents, which are int32 in -127..127."""
    bits = torch.where(exponents == -BIAS, 1 << 22, (exponents + BIAS) << 23)  # 2 ** -127 is a subnormal number
    return bits.view(torch.float32).unsqueeze(-1)


def _e4m3(quotients: Tensor) -> Tensor:
    return quotients.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def _e4m3_unsigned_zero(quotients: Tensor) -> Tensor:
    return _e4m3(quotients.add_(0.0))  # adding a zero point of 0 makes -0 a +0


def _e2m1(quotients: Tensor) -> Tensor:
    return e2m1.pack(e2m1.nearest(quotients))


def _e2m1_down(quotients: Tensor) -> Tensor:
    return e2m1.pack(e2m1.nearest_down(quotients))


#: Every codec by the name that the dialects use.
CODECS: dict[str, MxCodec] = {
    "mxfp4.modelopt.32": MxCodec(
        Element(e2m1.MAX, "weight", torch.uint8, _e2m1_down, e2m1.unpack), _covering, _in_fp32
    ),
    "mxfp4.compressed-tensors.32": MxCodec(
        Element(e2m1.MAX, "weight_packed", torch.uint8, _e2m1, e2m1.unpack), _nearest_power, _in_dtype
    ),
    "mxfp8.modelopt.32": MxCodec(Element(E4M3_MAX, "weight", E4M3, _e4m3, to_fp32), _covering, _in_fp32),
    "mxfp8.compressed-tensors.32": MxCodec(
        Element(E4M3_MAX, "weight", E4M3, _e4m3_unsigned_zero, to_fp32), _nearest_power, _in_dtype
    ),
}
