"""Which module of a live model is in which format, and the JSON blocks that say so.

From nvidia-modelopt's quantizers where there are any, else from packed weights and the scales beside them. Reads
settings, dtypes and shapes; never a value. Names are those in memory; the blocks are made from names on the Hub.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from distribute.dialects import modelopt_blocks
from distribute.dialects.modelopt_blocks import LayerFormat
from distribute.errors import UserError
from distribute.layers import expert_of
from distribute.live.formats import (
    E2M1,
    E4M3,
    bits_of,
    format_names,
    is_packed,
    is_quantizer,
    own_tensors,
    shares_weight,
    sites,
)
from distribute.live.state import without_base_layer

log = logging.getLogger(__name__)

ROUTERS = ("gate", "router", "shared_expert_gate")
#: Tensors that hold a packed weight.
PACKED = ("weight", "qweight", "weight_packed")


@dataclass(frozen=True)
class Layers:
    """`formats`: modules in memory -> format, or None for those that a loader must be told to leave alone.

    `from_quantizers`: whether a quantizer says so. `unknown`: packed weights that nothing describes.
    """

    formats: dict[str, LayerFormat | None]
    from_quantizers: bool
    unknown: tuple[str, ...] = ()

    @property
    def quantized(self) -> bool:
        """Whether any module is in a format."""
        return any(self.formats.values())


def read_layers(model: nn.Module, is_modelopt_qlora: bool = False) -> Layers:
    """The format of every module. Each rank for itself; the answer is the same on all.

    Raises:
        UserError: a quantizer's settings are of no known format, or the weights of one module have several.
    """
    found: dict[str, set[LayerFormat | None]] = {}
    for site in sites(model, is_modelopt_qlora):
        form = None if shares_weight(model, site) else site.format
        found.setdefault(without_base_layer(site.module), set()).add(form)
    for module, forms in found.items():
        if len(forms) > 1:
            raise UserError(f"the weights of {module} have several formats ({format_names(forms)}); engines need one")
    formats = {module: forms.pop() for module, forms in found.items()}
    from_quantizers = any(formats.values())
    packed, unknown = _packed_layers(model, formats)
    formats |= packed
    if packed and not from_quantizers:
        formats = _unpacked_layers(model) | formats
    for router in _routers(model):
        formats.setdefault(router, None)
    return Layers(formats, from_quantizers, unknown)


def read_kv_format(model: nn.Module) -> str | None:
    """Of the K/V cache: FP8, NVFP4, NVFP4_AFFINE, or None without enabled quantizers.

    Raises:
        UserError: formats that a checkpoint cannot hold, or several.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        owned = (getattr(module, f"{which}_bmm_quantizer", None) for which in "kv")
        enabled = [quantizer for quantizer in owned if is_quantizer(quantizer) and quantizer.is_enabled]
        affine = all(hasattr(quantizer, "_bias_value") for quantizer in enabled)
        for quantizer in enabled:
            form = {E4M3: "FP8", E2M1: "NVFP4_AFFINE" if affine else "NVFP4"}.get(bits_of(quantizer))
            if form is None:
                raise UserError(
                    f"{name} quantizes its K/V cache with num_bits {bits_of(quantizer)}; a checkpoint can hold "
                    "FP8 (4, 3) and NVFP4 (2, 1)"
                )
            found.setdefault(form, name)
    if len(found) > 1:
        where = ", ".join(f"{form} in {name}" for form, name in found.items())
        raise UserError(f"K/V caches in several formats ({where}); engines need one for all layers, keys and values")
    return next(iter(found), None)


def quantization_blocks(
    layers: Layers,
    hub_formats: Mapping[str, LayerFormat | None],
    kv_cache: str | None,
    existing: Mapping[str, Any] | None,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(content of hf_quant_config.json, `quantization_config` of config.json); None: not to be written.

    Args:
        hub_formats: `layers.formats` by names on the Hub.
        existing: `quantization_config` of the model's config; kept when weights are packed and no quantizer is left.

    Raises:
        UserError: weights are packed in a way that nothing describes.
    """
    if existing and not layers.from_quantizers and (layers.quantized or layers.unknown):
        return None, dict(existing)
    if layers.unknown:
        raise UserError(
            f"{layers.unknown[0]} is packed, but neither a quantizer nor model.config.quantization_config says how; "
            "set the latter"
        )
    if layers.quantized or kv_cache:
        arguments = (hub_formats, kv_cache)
        return modelopt_blocks.hf_quant_config(*arguments), modelopt_blocks.quantization_config(*arguments)
    if existing:
        log.warning(
            "the model's config speaks of quantization, but no weight is quantized; quantization_config is left out"
        )
    return None, None


def _routers(model: nn.Module) -> Iterator[str]:
    """Modules that send tokens to experts: beside a container of experts, with a weight."""
    for name, module in model.named_modules():
        if hasattr(module, "experts"):
            for leaf in ROUTERS:
                router = getattr(module, leaf, None)
                if isinstance(router, nn.Module) and isinstance(getattr(router, "weight", None), Tensor):
                    yield f"{name}.{leaf}" if name else leaf


def _packed_layers(
    model: nn.Module, known: Mapping[str, LayerFormat | None]
) -> tuple[dict[str, LayerFormat | None], tuple[str, ...]]:
    """(formats, unknown) of packed weights without quantizers. Experts of a block are one module, as when fused.

    nvidia-modelopt takes the quantizers away from experts that it packs: what looks like a layer that still has its
    quantizers is in that layer's format.
    """
    examples = _packed_examples(model, known)
    formats: dict[str, LayerFormat | None] = {}
    unknown: list[str] = []
    for name, module in model.named_modules():
        tensors = dict(own_tensors(module))
        if without_base_layer(name) in known or not any(
            leaf in tensors and is_packed(tensors[leaf]) for leaf in PACKED
        ):
            continue
        form = _packed_format(tensors) or examples.get(_looks(tensors))
        if form is None:
            unknown.append(name)
            continue
        expert = expert_of(name)
        place = expert.block if expert else without_base_layer(name)
        if formats.setdefault(place, form) != form:
            raise UserError(
                f"{place} is packed in several formats ({format_names({form, formats[place]})}); engines need one"
            )
    return formats, tuple(unknown)


def _packed_examples(
    model: nn.Module, known: Mapping[str, LayerFormat | None]
) -> dict[tuple[Any, ...], LayerFormat | None]:
    """How packed layers of each format look; None for a look that several formats have."""
    examples: dict[tuple[Any, ...], LayerFormat | None] = {}
    for name, module in model.named_modules():
        form, tensors = known.get(without_base_layer(name)), dict(own_tensors(module))
        if form is not None and "weight" in tensors and is_packed(tensors["weight"]):
            look = _looks(tensors)
            examples[look] = form if examples.get(look, form) == form else None
    return examples


def _looks(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Dtypes and dimensions of a packed weight and its scales; not of what only some layers have."""
    leaves = ("weight", "weight_scale", "weight_scale_2")
    return tuple((leaf, tensors[leaf].dtype, tensors[leaf].dim()) for leaf in leaves if leaf in tensors)


def _packed_format(tensors: Mapping[str, Tensor]) -> LayerFormat | None:
    """By the scales beside the weight."""
    weight, scale = tensors.get("weight"), tensors.get("weight_scale")
    if weight is None or scale is None or "pre_quant_scale" in tensors:
        return None
    if weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32:
        return {0: LayerFormat("fp8"), 1: LayerFormat("fp8_pc_pt")}.get(scale.dim())
    if weight.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn and "weight_scale_2" in tensors:
        name = "nvfp4" if "input_scale" in tensors else "w4a16_nvfp4"
        return LayerFormat(name, 2 * weight.shape[-1] // scale.shape[-1])
    return None


def _unpacked_layers(model: nn.Module) -> dict[str, LayerFormat | None]:
    """Linear layers and embeddings of a packed model that are not packed."""
    kinds = (nn.Linear, nn.Embedding)
    return {name: None for name, module in model.named_modules() if isinstance(module, kinds)}
