"""The format of a weight of a live model, read from the settings of nvidia-modelopt's quantizers.

A quantizer is any module with `num_bits` and `is_enabled`; nothing of nvidia-modelopt is imported. Owns where
quantizers stand, and the rules by which their settings have the name of a format (as `get_quantization_format` of
0.47). Reads settings, dtypes and shapes; never a value.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from distribute.dialects.modelopt_blocks import LayerFormat
from distribute.errors import UserError

E4M3, E2M1, E8M0 = (4, 3), (2, 1), (8, 0)
PACKED_DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32)


@dataclass(frozen=True)
class Site:
    """A weight with its quantizers: one, or one for each expert of a fused 3-D weight."""

    module: str
    owner: nn.Module
    weight_name: str
    weight: Tensor
    quantizers: tuple[nn.Module, ...]
    inputs: nn.Module | None

    @property
    def key(self) -> str:
        """Of the weight in the model's state."""
        return f"{self.module}.{self.weight_name}" if self.module else self.weight_name

    @property
    def format(self) -> LayerFormat | None:
        """None when the quantizers are disabled.

        Raises:
            UserError: the settings are of no known format, or differ between experts.
        """
        found = {_format(self.key, quantizer, self.inputs, self.owner) for quantizer in self.quantizers}
        if len(found) > 1:
            raise UserError(
                f"the experts in {self.key} have several formats ({format_names(found)}); give all of them one"
            )
        return found.pop()


def sites(model: nn.Module, is_modelopt_qlora: bool = False) -> Iterator[Site]:
    """Every weight that has a weight quantizer, enabled or not; without LoRA adapters and what wraps them."""
    for name, module in model.named_modules(remove_duplicate=False):
        if is_modelopt_qlora and (hasattr(module, "base_layer") or "lora_A" in name or "lora_B" in name):
            continue
        for weight_name, weight in own_tensors(module):
            prefix = "" if weight_name == "weight" else f"{weight_name}_"
            one = getattr(module, f"{prefix}weight_quantizer", None)
            several = getattr(module, f"{prefix}weight_quantizers", None)
            quantizers = tuple(several) if isinstance(several, nn.ModuleList) else (one,)
            if all(is_quantizer(quantizer) for quantizer in quantizers) and quantizers:
                inputs = getattr(module, f"{prefix}input_quantizer", None)
                yield Site(name, module, weight_name, weight, quantizers, inputs)  # type: ignore[arg-type]


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is stored in a format already."""
    return weight.dtype in PACKED_DTYPES


def shares_weight(model: nn.Module, site: Site) -> bool:
    """Whether an embedding's weight is also another's. nvidia-modelopt leaves such a one as it is."""
    if not isinstance(site.owner, nn.Embedding):
        return False
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    others = (module for module in model.modules() if module is not site.owner)
    return site.key in {*tied, *tied.values()} or any(
        getattr(module, "weight", None) is site.weight for module in others
    )


def own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # one scale may stand under two names
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return chain(parameters, module.named_buffers(recurse=False, remove_duplicate=False))


def is_quantizer(module: Any) -> TypeGuard[nn.Module]:
    stages = isinstance(module, nn.Sequential) and len(module) and all(hasattr(stage, "num_bits") for stage in module)
    return isinstance(module, nn.Module) and bool(
        stages or (hasattr(module, "num_bits") and hasattr(module, "is_enabled"))
    )


def _format(key: str, quantizer: nn.Module, inputs: nn.Module | None, owner: nn.Module) -> LayerFormat | None:
    """The name for a pair of quantizers. The order of the questions matters."""
    if isinstance(quantizer, nn.Sequential):
        if not any(stage.is_enabled for stage in quantizer):
            return None
        if [bits_of(stage) for stage in quantizer] == [4, E4M3]:
            return LayerFormat("w4a8_awq", _blocks(quantizer[0]).get(-1) or 0)
        raise _unknown(key, quantizer)
    if not quantizer.is_enabled:
        return None
    blocks = _blocks(quantizer)
    name = _name(quantizer, blocks, inputs, bool(getattr(owner, "fused_with_prequant", False)))
    if name is None:
        raise _unknown(key, quantizer)
    return LayerFormat(name, blocks.get(-1) or 0)


def _name(quantizer: Any, blocks: Mapping[Any, Any], inputs: Any, smoothed: bool) -> str | None:
    bits, active = bits_of(quantizer), inputs is not None and inputs.is_enabled
    if bits == E4M3:
        return _name_of_fp8(quantizer, blocks)
    if bits != E2M1:
        return {4: "int4_awq", 8: "int8_sq" if active else "int8_wo"}.get(bits)
    if inputs is not None and hasattr(quantizer, "svdquant_lora_a"):
        return "nvfp4_svdquant"
    if smoothed or hasattr(inputs, "_pre_quant_scale"):
        return "nvfp4_awq"
    return _name_of_fp4(blocks, inputs if active else None)


def _name_of_fp8(quantizer: Any, blocks: Mapping[Any, Any]) -> str | None:
    if not blocks:
        return "fp8_pc_pt" if getattr(quantizer, "axis", None) == 0 else "fp8"
    if _is_dynamic(blocks) and blocks.get("scale_bits") == E8M0:
        return "mxfp8"
    return "fp8_pb_wo" if getattr(quantizer, "fake_quant", True) else "fp8_pb_real"


def _name_of_fp4(blocks: Mapping[Any, Any], inputs: Any) -> str | None:
    """`inputs`: the quantizer of the inputs when it is enabled."""
    nv = {E4M3: True, E8M0: False}.get(blocks.get("scale_bits", ()))
    if nv is None:
        return None
    if inputs is None:
        return "w4a16_nvfp4" if nv else "w4a16_mxfp4"
    if _is_dynamic(blocks) and bits_of(inputs) == E4M3 and not _blocks(inputs):
        return "w4a8_nvfp4_fp8" if nv else "w4a8_mxfp4_fp8"
    return "nvfp4" if nv else "mxfp4"


def bits_of(quantizer: Any) -> Any:
    bits = quantizer.num_bits
    return bits if isinstance(bits, int) else tuple(bits)


def _blocks(quantizer: Any) -> dict[Any, Any]:
    blocks = dict(getattr(quantizer, "block_sizes", None) or {})
    return blocks | ({"scale_bits": tuple(blocks["scale_bits"])} if blocks.get("scale_bits") else {})


def _is_dynamic(blocks: Mapping[Any, Any]) -> bool:
    return blocks.get("type", "static") == "dynamic"


def _unknown(key: str, quantizer: nn.Module) -> UserError:
    return UserError(
        f"the quantizer of {key} is of no known format: {quantizer}; quantize with a preset of nvidia-modelopt"
    )


def format_names(formats: Iterable[LayerFormat | None]) -> str:
    return ", ".join(sorted(f"{form.id} {form.group_size or ''}".strip() if form else "none" for form in formats))
