"""NVFP4 in both dialects, by the one protocol of all formats: e2m1 codes, an e4m3 scale a group, a scale a weight.

    modelopt             value = code * weight_scale * weight_scale_2; scales of groups of 16 or 32 from fp32
                                                                       the arithmetic is in `nvfp4.py`
    compressed-tensors   value = code * weight_scale / weight_global_scale; the absmax of a group of 16 over 6, and
                         2688 over the absmax of the weight, are rounded to the model's dtype
                         compressed-tensors 0.20.1, quantization/utils/helpers.py, compressors/nvfp4

Where 2688 / absmax is no number of the model's dtype, the reference writes 1.0 and loses small groups. This happens
in fp16 below an absmax of 0.041; there the quotient is computed in fp32, and is 1.0 only where that is not finite.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distribute.numerics import e2m1, nvfp4
from distribute.numerics.codec import Ranges
from distribute.numerics.observers import last_absmax

#: What a group gets whose scale would be zero in compressed-tensors.
EPSILON = 0.125


def global_scale(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """compressed-tensors' scale of a weight or of inputs, a divisor: fp32 [1], of an fp32 absmax of one element.

    1.0 where the absmax is 0, nearly 0 or NaN.
    """
    absmax = absmax.reshape(1)
    scale = _over_absmax(absmax.to(dtype)).to(torch.float32)
    scale = torch.where(scale.isfinite(), scale, _over_absmax(absmax.to(torch.float32)))
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0)


def _over_absmax(absmax: Tensor) -> Tensor:
    # The reference divides a Python number, which torch does by the reciprocal, rounded to the dtype.
    return absmax.reciprocal() * (e2m1.MAX * nvfp4.E4M3_MAX)


def modelopt_input_values(absmax: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """`input_scale` fp32 0-dim of the absmax of inputs."""
    return {"input_scale": nvfp4.input_scale(absmax)}


def compressed_tensors_input_values(absmax: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """`input_global_scale` fp32 [1] of the absmax of inputs."""
    return {"input_global_scale": global_scale(absmax, dtype)}


@dataclass(frozen=True)
class ModelOptNvfp4:
    """`weight` uint8 [n, in / 2], `weight_scale` e4m3 [n, in / group_size]; of the whole weight `weight_scale_2`."""

    group_size: int = nvfp4.GROUP_SIZE
    rows_together: ClassVar[int] = 1

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """`weight_scale_2` fp32 0-dim."""
        return {"weight_scale_2": nvfp4.scale_2(absmax.reshape(()))}

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As `nvfp4.encode`, which see for what it raises."""
        assert ranges is None
        assert codes is None
        scale_2 = values["weight_scale_2"].to(rows.device)
        packed, scales = nvfp4.encode(rows, scale_2, dtype=rows.dtype, group_size=self.group_size)
        return {"weight": packed, "weight_scale": scales}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows."""
        return nvfp4.decode(stored["weight"], stored["weight_scale"], stored["weight_scale_2"])


@dataclass(frozen=True)
class CompressedTensorsNvfp4:
    """`weight_packed` uint8 [n, in / 2], `weight_scale` e4m3 [n, in / 16]; of the whole: `weight_global_scale`."""

    group_size: int = nvfp4.GROUP_SIZE
    rows_together: ClassVar[int] = 1

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """`weight_global_scale` fp32 [1]."""
        return {"weight_global_scale": global_scale(absmax, dtype)}

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Codes and scales of the groups.

        Raises:
            ValueError: the rows are not whole groups.
        """
        assert ranges is None
        assert codes is None
        n, width = rows.shape
        if width % self.group_size:
            raise ValueError(f"NVFP4 needs whole groups of {self.group_size} input features, but a row has {width}")
        whole = values["weight_global_scale"].to(rows.device)
        groups = rows.unflatten(1, (width // self.group_size, self.group_size))
        packed = torch.empty(n, width // 2, dtype=torch.uint8, device=rows.device)
        scales = torch.empty(groups.shape[:2], dtype=torch.float8_e4m3fn, device=rows.device)
        step = max(1, nvfp4.BLOCK // max(1, width))
        for start in range(0, n if width else 0, step):
            part = slice(start, start + step)
            scales[part] = _group_scales(groups[part], whole)
            quotient = groups[part].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            quotient.div_(_divisor(scales[part], whole))
            packed[part] = e2m1.pack(e2m1.nearest(quotient.flatten(1)))
        return {"weight_packed": packed, "weight_scale": scales}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows."""
        scales = stored["weight_scale"]
        groups = e2m1.unpack(stored["weight_packed"]).unflatten(1, (scales.shape[1], -1))
        return groups.mul_(_divisor(scales, stored["weight_global_scale"])).flatten(1)


def _group_scales(groups: Tensor, whole: Tensor) -> Tensor:
    """float8_e4m3fn [n, groups] of [n, groups, size] and the global scale [1]."""
    absmax = last_absmax(groups)
    scale = (absmax / torch.full_like(absmax, e2m1.MAX)).to(torch.float32).mul_(whole)
    scale = scale.clamp_(max=nvfp4.E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return scale.masked_fill_(scale == 0, EPSILON).to(torch.float8_e4m3fn)


def _divisor(scales: Tensor, whole: Tensor) -> Tensor:
    """fp32 [n, groups, 1]: what the codes of a group are multiplied by."""
    return (scales.to(torch.float32) / whole).unsqueeze(-1)


#: Every codec by the name that the dialects use.
CODECS: dict[str, ModelOptNvfp4 | CompressedTensorsNvfp4] = {
    "nvfp4.modelopt.16": ModelOptNvfp4(16),
    "nvfp4.modelopt.32": ModelOptNvfp4(32),
    "nvfp4.compressed-tensors.16": CompressedTensorsNvfp4(),
}
