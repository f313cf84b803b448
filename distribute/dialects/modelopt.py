"""The ModelOpt dialect: what nvidia-modelopt 0.47's `export_hf_checkpoint` writes, for vLLM, SGLang, TensorRT-LLM.

Owns names, dtypes, shapes and JSON, not numbers. Torch-free.
"""

from collections.abc import Iterable
from typing import Any

from distribute.dialects import modelopt_blocks
from distribute.dialects.modelopt_blocks import HF_QUANT_CONFIG, LayerFormat
from distribute.dialects.spec import (
    ShareGroups,
    TensorSpec,
    expert_gate_up_groups,
    expert_input_groups,
)
from distribute.recipe import Scheme

#: Format by granularity of the weight scale.
_FORMATS = {"tensor": LayerFormat("fp8"), "channel": LayerFormat("fp8_pc_pt")}


def codec(scheme: Scheme) -> str:
    """Key of `distribute.numerics.fp8.CODECS` for the weights."""
    return f"fp8.modelopt.{scheme.weights.granularity}"


def tensors(shape: tuple[int, int], scheme: Scheme, model_dtype: str) -> tuple[TensorSpec, ...]:
    """Stored tensors of a quantized linear layer with weight (out, in). Scales are fp32 whatever `model_dtype` is."""
    scale_shape = (shape[0],) if scheme.weights.granularity == "channel" else ()
    specs = [
        TensorSpec("weight", "F8_E4M3", shape, "weight"),
        TensorSpec("weight_scale", "F32", scale_shape, "weight_scale"),
    ]
    if scheme.needs_data:
        specs.append(TensorSpec("input_scale", "F32", (), "input_scale"))
    return tuple(specs)


def share_groups(modules: Iterable[str], scheme: Scheme) -> ShareGroups:
    """Experts share as in the reference, which holds all experts of a block in one fused tensor.

    One input scale for all gate and up projections of a block and one for all down projections; one weight scale
    for gate and up of an expert when it is per tensor. Dense layers share nothing: engines take the maximum.
    """
    modules = tuple(modules)
    return ShareGroups(
        weight=expert_gate_up_groups(modules) if scheme.weights.granularity == "tensor" else (),
        input=expert_input_groups(modules) if scheme.needs_data else (),
    )


def quantization_config(
    quantized: Iterable[str], kept: Iterable[str], scheme: Scheme, *, embeddings: Iterable[str] = ()
) -> dict[str, Any]:
    """The `quantization_config` block of config.json. Only per tensor FP8 names its operands."""
    return modelopt_blocks.quantization_config(_layers(quantized, (*kept, *embeddings), scheme))


def extra_files(
    quantized: Iterable[str], kept: Iterable[str], scheme: Scheme, *, embeddings: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """hf_quant_config.json, which must agree with the block in config.json."""
    return {HF_QUANT_CONFIG: modelopt_blocks.hf_quant_config(_layers(quantized, (*kept, *embeddings), scheme))}


def _layers(quantized: Iterable[str], kept: Iterable[str], scheme: Scheme) -> dict[str, LayerFormat | None]:
    return dict.fromkeys(kept) | dict.fromkeys(quantized, _FORMATS[scheme.weights.granularity])
