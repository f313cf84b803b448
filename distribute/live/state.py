"""What of a model's state goes into a checkpoint, and under which name: nvidia-modelopt's own tensors renamed.

Owns what `postprocess_state_dict` of nvidia-modelopt 0.47 does to names: quantizer state is dropped, the absmax of
keys and values becomes a scale, LoRA adapters are left out. Reads no data but these few absmax values.
Names are those in memory.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from distribute.errors import UserError

log = logging.getLogger(__name__)

KV_CACHE_FORMATS = ("FP8", "NVFP4", "NVFP4_AFFINE")
#: End of a key -> what it becomes. An absmax among them becomes a scale.
RENAMED = {
    "k_bmm_quantizer._amax": "k_proj.k_scale",
    "v_bmm_quantizer._amax": "v_proj.v_scale",
    "k_bmm_quantizer._bias_value": "k_proj.k_bias",
    "v_bmm_quantizer._bias_value": "v_proj.v_bias",
    "input_quantizer._pre_quant_scale": "pre_quant_scale",
}
#: A key that holds one of these and has no new name is quantizer state.
DROPPED = ("output_quantizer", "_amax", "_bias_value", "input_quantizer._pre_quant_scale", "weight_shape")
#: Ends of keys of compressed weights, and one key of a vision model that no loader takes.
DROPPED_ENDS = tuple(f"weight_quantizer.{leaf}" for leaf in ("_scale", "_double_scale", "_scale_zeros"))
DROPPED_KEYS = ("vision_model.radio_model.summary_idxs",)
LARGE_SCALE = 0.5


@dataclass(frozen=True)
class CleanState:
    """`sources`: name in the checkpoint, as in memory -> key of the state. `shapes`: of all of these, whole.

    `values`: the K/V scales, fp32 0-dim on CPU, by name. They are in `shapes` but not in `sources`.
    """

    sources: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    values: dict[str, Tensor]


def clean_state(
    state: Mapping[str, Tensor], maxbound: float, kv_cache_format: str | None, is_modelopt_qlora: bool = False
) -> CleanState:
    """Choose and rename. Each rank for itself; the answer is the same on all.

    Args:
        state: `model.state_dict()`; DTensors or plain tensors.
        maxbound: divisor of the absmax of keys and values; 448 is what loaders expect, for FP8 and for NVFP4.
        kv_cache_format: one of `KV_CACHE_FORMATS`, or None when the state has no absmax of keys or values.

    Raises:
        UserError: the absmax of keys or values cannot become a scale, or two keys get one name.
    """
    clean = CleanState({}, {}, {})
    for key, tensor in state.items():
        name = clean_name(key, is_modelopt_qlora)
        if name is None:
            continue
        if name in clean.shapes:
            raise UserError(f"two tensors of the state become {name}; the second is {key}: rename or remove one")
        if key.endswith("_amax"):
            clean.values[name] = _kv_scale(key, tensor, maxbound, kv_cache_format)
            clean.shapes[name] = ()
        else:
            clean.sources[name] = key
            clean.shapes[name] = _squeezed(name, tuple(tensor.shape))
    return clean


def clean_name(key: str, is_modelopt_qlora: bool = False) -> str | None:
    """The name of a state tensor in the checkpoint, as in memory; None when it has no place there."""
    if key in DROPPED_KEYS or key.endswith(DROPPED_ENDS) or (is_modelopt_qlora and "lora" in key):
        return None
    name: str | None = key
    if any(word in key for word in DROPPED):
        ends = (key.removesuffix(old) + new for old, new in RENAMED.items() if key.endswith(old))
        name = next(ends, None)
    return without_base_layer(name) if name and is_modelopt_qlora else name


def without_base_layer(name: str) -> str:
    """A name without the component that PEFT puts around an adapted layer."""
    return name.replace(".base_layer.", ".").removesuffix(".base_layer")


def replicated_value(name: str, tensor: Tensor) -> Tensor:
    """A small tensor that every rank holds whole, in fp32 on CPU, a copy.

    Raises:
        UserError: it is spread over ranks or has no data.
    """
    if isinstance(tensor, DTensor):
        if not all(isinstance(placement, Replicate) for placement in tensor.placements):
            raise UserError(f"{name} is placed {tensor.placements}; redistribute it to Replicate on every rank")
        tensor = tensor.to_local()
    if tensor.is_meta:
        raise UserError(f"{name} is on the meta device; load or calibrate the model before it is exported")
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True)


def _kv_scale(key: str, tensor: Tensor, maxbound: float, kv_cache_format: str | None) -> Tensor:
    if kv_cache_format not in KV_CACHE_FORMATS:
        raise UserError(
            f"{key} calibrates a K/V cache, but kv_cache_format is {kv_cache_format!r}; a checkpoint can hold "
            f"{', '.join(KV_CACHE_FORMATS)}: give the format of the cache, or disable its quantizers"
        )
    if not maxbound > 0:
        raise UserError(
            f"maxbound is {maxbound}; it divides {key} and must be greater than zero (448 for {KV_CACHE_FORMATS[0]})"
        )
    amax = replicated_value(key, tensor)
    if amax.numel() != 1 or torch.isinf(amax).any():
        raise UserError(f"{key} of shape {list(amax.shape)} must be one finite value; calibrate the cache per tensor")
    amax = amax.reshape(())
    if not amax > 0:
        log.warning("%s is %s: the cache saw nothing; its scale is written as 1.0", key, amax.item())
        return torch.ones(())
    scale = amax / torch.full_like(amax, maxbound)
    if kv_cache_format == "FP8" and scale > LARGE_SCALE:
        log.warning("%s gives a scale of %.3g; so large a range may cost accuracy in an FP8 cache", key, scale.item())
    return scale


def _squeezed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the leading axis of a 3-D scale of one matrix; its flat rows stay."""
    return shape[1:] if "scale" in name and len(shape) == 3 and shape[0] == 1 else shape
