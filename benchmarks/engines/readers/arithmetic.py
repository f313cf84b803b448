"""What the missing kernels compute, in plain torch: exact on the codes, slow, and free of any engine."""

import torch
from torch import Tensor
from torch.nn import functional

FP8_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK, GROUP = 128, 32


def quantize_fp8(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`vllm._custom_ops.scaled_fp8_quant` for scales of a tensor or of rows. Parameters are named as there."""
    values = input.float()
    if scale is None:
        absmax = values.abs().amax(dim=-1, keepdim=True) if use_per_token_if_dynamic else values.abs().max().view(1)
        scale = (absmax if scale_ub is None else absmax.clamp(max=scale_ub)) / FP8_MAX
        scale = scale.clamp(min=1 / (FP8_MAX * 512))
    codes = (values / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    if num_token_padding:
        codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, max(num_token_padding - len(codes), 0)))
        codes = codes.view(torch.float8_e4m3fn)
    return (codes if output is None else output.copy_(codes)), scale


def scaled_matmul(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **_: object,
) -> Tensor:
    """`torch._scaled_mm` of fp8 matrices: minutes a call on a CPU as it is."""
    product = (left.float() @ right.float()) * scale_a * scale_b
    return (product if bias is None else product + bias).to(out_dtype or left.dtype)


def dequantize_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Two codes a byte, the first in the low half; scales uint8, the exponents of powers of two, bias 127."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(GROUP, -1)
    return (values * factors).to(dtype)


def round_to_mxfp4(x: Tensor) -> Tensor:
    """Inputs as MXFP4 leaves them. The scale of 32 values is the power of two of their absmax over 4, the next one
    from 1.75 times a power on: the mode "even", which vLLM asks for.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    absmax = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    factors = torch.exp2(((absmax.view(torch.int32) + (1 << 21)) >> 23).float() - 129)
    scaled = (groups.abs() / factors).clamp(max=6.0)
    # A tie goes to the even code: 0.25 down to 0, 0.75 up to 1, 5 down to 4.
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    codes = torch.bucketize(scaled, middles)
    codes += (scaled == middles[codes.clamp(max=6)]) & (codes % 2 == 1)
    return (E2M1[codes] * groups.sign() * factors).flatten(-2).to(x.dtype)


def block_matmul(inputs: Tensor, weight: Tensor, input_scales: Tensor, weight_scales: Tensor) -> Tensor:
    """inputs fp8 [tokens, in], a scale for each 128 values; weight fp8 [out, in], a scale for each 128x128 block.

    The last group and the last block may be short. Returns fp32 [tokens, out].
    """
    left = inputs.float() * input_scales.repeat_interleave(BLOCK, 1)[:, : inputs.shape[1]]
    rows = weight_scales.float().repeat_interleave(BLOCK, 0)[: weight.shape[0]]
    return left @ (weight.float() * rows.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]).T


def decode_packed_int8(packed: Tensor, scales: Tensor) -> Tensor:
    """int32 [out, in / 4], the first code in the lowest byte, each 128 too large; scales [out, groups]."""
    codes = packed.contiguous().view(torch.uint8).float() - 128
    return (codes.unflatten(1, (scales.shape[1], -1)) * scales.float().unsqueeze(-1)).flatten(1).to(scales.dtype)
