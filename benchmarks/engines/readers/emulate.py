"""Plain arithmetic in place of what vLLM's CPU build has for GPUs only, so that its loaders can be tried without one.

`install()` replaces names inside vLLM in this process. What stays vLLM's own: reading the config, choosing the scheme
of each layer, loading, fusing and rescaling the tensors, and the model. What is not tried: its GPU kernels, their
layouts and their limits of size.
"""

import torch
import vllm._custom_ops as ops
import vllm.model_executor.kernels.linear as linear
import vllm.model_executor.kernels.linear.mxfp4.emulation as mxfp4_emulation
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.kernels.linear.scaled_mm import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.platforms import PlatformEnum

FP8_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCK, GROUP = 128, 32


def install() -> list[str]:
    """Replace; returns what was, for the record."""
    ops.scaled_fp8_quant = quantize_fp8
    torch._scaled_mm = scaled_matmul
    fused_act_quant._FUSED_ACT_QUANT.clear()  # silu and rounding apart, as without fusion
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [BlockFp8Kernel]
    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationNvFp4LinearKernel]
    linear.MarlinNvFp4LinearKernel = WeightOnlyNvfp4Kernel
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
    linear._POSSIBLE_MXFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp4LinearKernel]
    mxfp4_emulation.has_quark = lambda: True
    mxfp4_emulation.dequant_mxfp4 = dequantize_mxfp4
    mxfp4_emulation._ACTIVATION_QUANT_DEQUANT_FUNCS[mxfp4_emulation.kMxfp4Dynamic] = round_to_mxfp4
    return ["fp8 rounding", "fp8 matmul", "fp8 blocks", "nvfp4", "nvfp4 weights", "mxfp8", "mxfp4"]


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


class BlockFp8Kernel(Fp8BlockScaledMMLinearKernel):
    """fp8 weights with a scale for each 128x128 block, inputs with one for each 128 values of a token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803
        """A fp8 [tokens, in], As [tokens, in / 128]; B fp8 [out, in], Bs [out / 128, in / 128], both rounded up."""
        inputs = A.float() * As.repeat_interleave(BLOCK, 1)[:, : A.shape[1]]
        scales = Bs.float().repeat_interleave(BLOCK, 0)[: B.shape[0]].repeat_interleave(BLOCK, 1)[:, : B.shape[1]]
        return inputs @ (B.float() * scales).T


class WeightOnlyNvfp4Kernel(linear.NvFp4LinearKernel):
    """NVFP4 weights, inputs as they are; vLLM's reference arithmetic decodes."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to rearrange."""

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = dequantize_to_dtype(
            layer.weight.data, layer.weight_scale.data, layer.weight_global_scale, x.dtype, swizzle=False
        )
        return functional.linear(x, weight, bias)


def dequantize_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Two codes a byte, the first in the low half; scales uint8, the exponents of powers of two, bias 127."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    factors = torch.exp2(scales.float() - 127).repeat_interleave(GROUP, -1)
    return (values * factors).to(dtype)


def round_to_mxfp4(x: Tensor) -> Tensor:
    """Inputs as MXFP4 leaves them: the scale of 32 values is 2^(floor(log2(absmax)) - 2), as the OCP text says."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    absmax = groups.abs().amax(-1, keepdim=True)
    factors = torch.exp2(torch.floor(torch.log2(absmax.clamp(min=2.0**-125))) - 2)
    scaled = (groups.abs() / factors).clamp(max=6.0)
    # A tie goes to the even code: 0.25 down to 0, 0.75 up to 1, 5 down to 4.
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    codes = torch.bucketize(scaled, middles)
    codes += (scaled == middles[codes.clamp(max=6)]) & (codes % 2 == 1)
    return (E2M1[codes] * groups.sign() * factors).flatten(-2).to(x.dtype)
