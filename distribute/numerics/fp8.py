"""FP8 (e4m3) arithmetic: scales from absmax, encode, decode. Pure functions on tensors.

Every step is written in the dtype in which the reference exporter computes it on CPU, and the same way on every
device, because the checkpoint must be equal byte for byte. What differs between the references is one table,
`CODECS`:

    modelopt             weight scale fp32: () or [out]; quotient rounded to the weight's dtype (per tensor)
                         or kept in fp32 (per channel)              nvidia-modelopt 0.47, export/quant_utils.py
    compressed-tensors   weight scale in the weight's dtype: [1] or [out, 1]; quotient rounded to that dtype
                         compressed-tensors 0.20.1, quantization/utils/helpers.py and lifecycle/forward_helpers.py

A scale is always finite and > 0: a weight that is all zero gets scale 1.0 and zero codes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
#: Elements encoded at a time: two fp32 copies of them stay in a core's cache.
BLOCK = 1 << 18


@dataclass(frozen=True)
class Codec:
    """How the weights of one dialect and granularity are scaled and coded.

    `weight_scale(row_absmax, dtype)`: fp32 [out] absmax of *all* rows and the weight's dtype -> scale.
    `input_scale(absmax, dtype)`: fp32 0-dim absmax of the inputs and the model's dtype -> scale.
    `round_quotient(dtype)`: the dtype to which weight / scale is rounded before it becomes a code.
    """

    name: str
    per_row: bool
    weight_scale: Callable[[Tensor, torch.dtype], Tensor]
    input_scale: Callable[[Tensor, torch.dtype], Tensor]
    round_quotient: Callable[[torch.dtype], torch.dtype]
    signed_zero: bool  # whether -0.0 keeps its sign

    def scale_of_rows(self, scale: Tensor, rows: range) -> Tensor:
        """The part of a weight's scale that belongs to `rows` (step 1) of the weight."""
        return scale[rows.start : rows.stop] if self.per_row else scale

    def encode(self, rows: Tensor, scale: Tensor) -> Tensor:
        """Codes float8_e4m3fn [rows, in] of float weight rows [rows, in] and the scale of these rows.

        A quotient beyond ±448 saturates. (The references rely on absmax >= |weight|, where this changes nothing.)
        """
        divisor = self._divisor(scale)
        through = self.round_quotient(rows.dtype)
        codes = torch.empty(rows.shape, dtype=E4M3, device=rows.device)
        step = max(1, BLOCK // max(1, rows.shape[1]))
        for start in range(0, rows.shape[0], step):
            part = slice(start, start + step)
            quotient = rows[part].to(torch.float32, copy=True)
            quotient.div_(divisor[part] if self.per_row else divisor)
            quotient = quotient.to(through)
            if not self.signed_zero:
                quotient.add_(0.0)
            # explicit, because whether the cast itself saturates or writes NaN depends on the torch version
            codes[part] = quotient.clamp_(-E4M3_MAX, E4M3_MAX)
        return codes

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """fp32 [rows, in] values of float8_e4m3fn codes [rows, in] and the scale of these rows."""
        return to_fp32(codes).mul_(self._divisor(scale))

    def _divisor(self, scale: Tensor) -> Tensor:
        """The scale in fp32, shaped to broadcast over a weight: [rows, 1] or 0-dim."""
        scale = scale.to(torch.float32)
        return scale.reshape(-1, 1) if self.per_row else scale.reshape(())


def to_fp32(codes: Tensor) -> Tensor:
    """`codes.to(torch.float32)` of float8_e4m3fn codes. By a table, which is five times faster on a CPU."""
    table = torch.arange(256, dtype=torch.int32, device=codes.device).to(torch.uint8).view(E4M3).to(torch.float32)
    return table.index_select(0, codes.reshape(-1).view(torch.uint8).int()).reshape(codes.shape)


def _over_e4m3_max(absmax: Tensor) -> Tensor:
    # A tensor divisor, not a Python number: CUDA multiplies by the reciprocal of a number, which rounds differently.
    return absmax / torch.full_like(absmax, E4M3_MAX)


def _guarded(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """The absmax that modelopt exports: zero becomes 448 (scale 1.0), subnormal becomes the least normal."""
    absmax = torch.where(absmax == 0, torch.full_like(absmax, E4M3_MAX), absmax)
    return absmax.clamp(min=torch.finfo(dtype).tiny)


def _modelopt_tensor_scale(row_absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 0-dim. The reference writes scale 0 and NaN codes where the absmax is (nearly) zero; here 1.0."""
    scale = _over_e4m3_max(row_absmax.max())
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def guarded_scale(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """modelopt's scales of many rows or blocks: fp32; the guard works in the weight's dtype."""
    return _over_e4m3_max(_guarded(absmax, dtype))


def _modelopt_input_scale(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 0-dim; the guard works in fp32 whatever the model's dtype."""
    return _over_e4m3_max(_guarded(absmax.reshape(()), torch.float32))


def epsilon_scale(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """compressed-tensors' scales: absmax / 448 in `dtype`; a zero scale becomes the machine epsilon of `dtype`."""
    scale = _over_e4m3_max(absmax).to(dtype)
    return torch.where(scale == 0, torch.full_like(scale, torch.finfo(dtype).eps), scale)


def _ct_tensor_scale(row_absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """[1] in the weight's dtype; an all-zero weight gets 1.0 instead of epsilon."""
    absmax = row_absmax.max().reshape(1)
    return torch.ones_like(absmax, dtype=dtype) if absmax == 0 else epsilon_scale(absmax, dtype)


def _ct_channel_scale(row_absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, 1] in the weight's dtype; epsilon for a zero row, 1.0 when every row is zero."""
    absmax = row_absmax.reshape(-1, 1)
    return torch.ones_like(absmax, dtype=dtype) if not absmax.any() else epsilon_scale(absmax, dtype)


def _ct_input_scale(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """[1] in the model's dtype."""
    return epsilon_scale(absmax.reshape(1), dtype)


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32


#: Every codec by the name that the dialects use.
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("fp8.modelopt.tensor", False, _modelopt_tensor_scale, _modelopt_input_scale, _same, True),
        Codec("fp8.modelopt.channel", True, guarded_scale, _modelopt_input_scale, _fp32, True),
        Codec("fp8.compressed-tensors.tensor", False, _ct_tensor_scale, _ct_input_scale, _same, False),
        Codec("fp8.compressed-tensors.channel", True, _ct_channel_scale, _ct_input_scale, _same, False),
    )
}
