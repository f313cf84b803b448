"""How a weight that its model holds in floating point is stored, by format: which tensors, which scales, which codes.

One table, `FORMATS`. Every format works on flat rows, so a rank can encode the rows it holds and nothing else. The
scales come from absmax values that are the same on all ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.numerics import nvfp4
from distribute.numerics.fp8 import CODECS


@dataclass(frozen=True)
class Format:
    """One way to store a weight.

    `per_row`: whether each row has an absmax of its own. `in_groups`: whether groups along a row must fill it.
    `tensors(width, group_size)`: suffix -> (safetensors dtype, elements a row) of what is written row by row.
    `scales(absmax, dtype)`: suffix -> whole tensor, from the absmax of the weight (fp32; 0-dim, or [rows] per row).
    `encode(rows, scales, at, dtype, group_size)`: suffix -> tensor [n, elements a row] of float rows [n, width],
    which are rows `at` of the weight; `dtype` is the model's, to which a weight is rounded before it is coded.
    `input_scale(absmax, dtype)`: the stored scale of the inputs; None where inputs are scaled at run time.
    """

    per_row: bool
    in_groups: bool
    tensors: Callable[[int, int], dict[str, tuple[str, int]]]
    scales: Callable[[Tensor, torch.dtype], dict[str, Tensor]]
    encode: Callable[[Tensor, Mapping[str, Tensor], range, torch.dtype, int], dict[str, Tensor]]
    input_scale: Callable[[Tensor, torch.dtype], Tensor] | None


def _fp8(codec_name: str, *, static: bool) -> Format:
    codec = CODECS[codec_name]

    def encode(
        rows: Tensor, scales: Mapping[str, Tensor], at: range, dtype: torch.dtype, group_size: int
    ) -> dict[str, Tensor]:
        scale = codec.scale_of_rows(scales["weight_scale"], at).to(rows.device)
        return {"weight": codec.encode(rows.to(dtype), scale)}

    return Format(
        per_row=codec.per_row,
        in_groups=False,
        tensors=lambda width, group_size: {"weight": ("F8_E4M3", width)},
        scales=lambda absmax, dtype: {"weight_scale": codec.weight_scale(absmax.reshape(-1), dtype)},
        encode=encode,
        input_scale=codec.input_scale if static else None,
    )


def _nvfp4_encode(
    rows: Tensor, scales: Mapping[str, Tensor], at: range, dtype: torch.dtype, group_size: int
) -> dict[str, Tensor]:
    scale_2 = scales["weight_scale_2"].to(rows.device)
    codes, blocks = nvfp4.encode(rows, scale_2, dtype=dtype, group_size=group_size)
    return {"weight": codes, "weight_scale": blocks}


def _nvfp4(*, static: bool) -> Format:
    return Format(
        per_row=False,
        in_groups=True,
        tensors=lambda width, group_size: {
            "weight": ("U8", width // 2),
            "weight_scale": ("F8_E4M3", width // group_size),
        },
        scales=lambda absmax, dtype: {"weight_scale_2": nvfp4.scale_2(absmax.reshape(()))},
        encode=_nvfp4_encode,
        input_scale=(lambda absmax, dtype: nvfp4.input_scale(absmax)) if static else None,
    )


#: By the names that nvidia-modelopt gives them.
FORMATS: dict[str, Format] = {
    "fp8": _fp8("fp8.modelopt.tensor", static=True),
    "fp8_pc_pt": _fp8("fp8.modelopt.channel", static=False),
    "nvfp4": _nvfp4(static=True),
    "w4a16_nvfp4": _nvfp4(static=False),
}
