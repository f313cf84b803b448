"""Plain arithmetic in place of what vLLM's CPU build has for GPUs only, so that its loaders can be tried without one.

`install()` replaces names inside vLLM in this process. What stays vLLM's own: reading the config, choosing the scheme
of each layer, loading, fusing and rescaling the tensors, and the model. What is not tried: its GPU kernels, their
layouts and their limits of size.
"""

import arithmetic
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


def install() -> list[str]:
    """Replace; returns what was, for the record."""
    ops.scaled_fp8_quant = arithmetic.quantize_fp8
    torch._scaled_mm = arithmetic.scaled_matmul
    fused_act_quant._FUSED_ACT_QUANT.clear()  # silu and rounding apart, as without fusion
    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [BlockFp8Kernel]
    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationNvFp4LinearKernel]
    linear.MarlinNvFp4LinearKernel = WeightOnlyNvfp4Kernel
    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
    linear._POSSIBLE_MXFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp4LinearKernel]
    linear._POSSIBLE_KERNELS[PlatformEnum.CPU].append(WeightOnlyInt8Kernel)
    mxfp4_emulation.has_quark = lambda: True
    mxfp4_emulation.dequant_mxfp4 = arithmetic.dequantize_mxfp4
    mxfp4_emulation._ACTIVATION_QUANT_DEQUANT_FUNCS[mxfp4_emulation.kMxfp4Dynamic] = arithmetic.round_to_mxfp4
    return ["fp8 rounding", "fp8 matmul", "fp8 blocks", "nvfp4", "nvfp4 weights", "mxfp8", "mxfp4", "int8 weights"]


class BlockFp8Kernel(Fp8BlockScaledMMLinearKernel):
    """fp8 weights with a scale for each 128x128 block, inputs with one for each 128 values of a token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:  # noqa: N803
        """Parameters are named as there."""
        return arithmetic.block_matmul(A, B, As, Bs)


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


class WeightOnlyInt8Kernel(linear.MPLinearKernel):
    """int8 weights with a scale for each row, inputs as they are. Four codes lie in an int32, each 128 too large."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: linear.MPLinearLayerConfig) -> tuple[bool, str | None]:
        return str(c.weight_type) == "uint8b128" and not c.zero_points, "only int8 weights without zero points"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode once; the scales' names stay, for vLLM asks for them."""
        packed, scales, _ = self._get_weight_params(layer)
        weight = arithmetic.decode_packed_int8(packed.data, scales.data)
        setattr(layer, self.w_q_name, torch.nn.Parameter(weight, requires_grad=False))

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, getattr(layer, self.w_q_name).to(x.dtype), bias)
