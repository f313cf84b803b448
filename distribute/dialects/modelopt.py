"""The ModelOpt dialect: what nvidia-modelopt 0.47's `export_hf_checkpoint` writes, for vLLM, SGLang, TensorRT-LLM.

Owns names, dtypes, shapes and who shares a scale, not numbers. Torch-free. Scales are fp32 whatever the model is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from distribute.dialects import modelopt_blocks
from distribute.dialects.modelopt_blocks import HF_QUANT_CONFIG, LayerFormat
from distribute.dialects.spec import (
    KvSpec,
    ShareGroups,
    TensorSpec,
    expert_gate_up_groups,
    expert_input_groups,
    same_input_groups,
)
from distribute.scheme import Scheme


@dataclass(frozen=True)
class _Layout:
    """How codes are stored: dtype, rows and columns of the weight in one element; dtype of scales of parts."""

    dtype: str
    rows: int = 1
    columns: int = 1
    scale_dtype: str = "F32"


_LAYOUTS = {
    "fp8": _Layout("F8_E4M3"),
    "int8": _Layout("I8"),
    "int4": _Layout("U8", rows=2),  # two rows of output in one byte
    "nvfp4": _Layout("U8", columns=2, scale_dtype="F8_E4M3"),
    "mxfp4": _Layout("U8", columns=2, scale_dtype="U8"),
    "mxfp8": _Layout("F8_E4M3", scale_dtype="U8"),
}


def codec(scheme: Scheme) -> str:
    """Key for `distribute.numerics.table.find_codec`."""
    weights = scheme.weights
    form = "w4a8" if weights.format == "int4" and scheme.inputs else weights.format
    return f"{form}.modelopt.{weights.group_size if weights.granularity == 'group' else weights.granularity}"


def tensors(
    shape: tuple[int, int], scheme: Scheme, model_dtype: str, *, smoothed: bool = False
) -> tuple[TensorSpec, ...]:
    """Stored tensors of a quantized linear layer with weight (out, in)."""
    specs = list(_weight_tensors(*shape, scheme))
    if scheme.static_inputs:
        specs.append(TensorSpec("input_scale", "F32", ()))
    if smoothed:
        specs.append(TensorSpec("pre_quant_scale", model_dtype, (shape[1],)))
    return tuple(specs)


def _weight_tensors(rows: int, columns: int, scheme: Scheme) -> Iterator[TensorSpec]:
    weights, layout = scheme.weights, _LAYOUTS[scheme.weights.format]
    size = weights.group_size
    yield TensorSpec("weight", layout.dtype, (rows // layout.rows, columns // layout.columns), layout.rows)
    match weights.granularity:
        case "tensor":
            yield TensorSpec("weight_scale", layout.scale_dtype, ())
        case "channel":
            yield TensorSpec("weight_scale", layout.scale_dtype, (rows,), 1)
        case "group":
            yield TensorSpec("weight_scale", layout.scale_dtype, (rows, columns // size), 1)
        case "block":
            blocks = (ceil(rows / size), 1, ceil(columns / size), 1)
            yield TensorSpec("weight_scale", layout.scale_dtype, blocks, size)
    if weights.granularity == "group" and _has_whole_scale(scheme):
        yield TensorSpec("weight_scale_2", "F32", ())


def share_groups(schemes: Mapping[str, Scheme]) -> ShareGroups:
    """Experts share as in the reference, which holds all experts of a block in one fused tensor.

    One input scale for all gate and up projections of a block and one for all down projections; one weight scale
    for gate and up of an expert when there is one for the whole weight. Dense layers that read the same input share
    scales of whole weights and inputs, which engines hold once for the fused matrix; but not plain FP8, where engines
    take the maximum.
    """
    whole = [name for name, scheme in schemes.items() if _has_whole_scale(scheme)]
    fused = [name for name in whole if schemes[name].weights.format != "fp8"]
    static = [name for name, scheme in schemes.items() if scheme.static_inputs]
    return ShareGroups(
        weight=(*expert_gate_up_groups(whole), *same_input_groups(fused)),
        input=(*same_input_groups(static), *expert_input_groups(static)),  # the wider group has the last word
    )


def _has_whole_scale(scheme: Scheme) -> bool:
    """Whether one scale holds for a whole weight: W4A8 has one over those of its groups, as NVFP4."""
    weights = scheme.weights
    w4a8 = weights.format == "int4" and scheme.inputs is not None
    return weights.granularity == "tensor" or weights.format == "nvfp4" or w4a8


def kv_tensors(kv_cache: str, model_dtype: str) -> tuple[KvSpec, ...]:
    """0-dim fp32 scales beside the projections, alike for FP8 and NVFP4."""
    return (KvSpec("k_proj", "k_scale", "F32", (), "k"), KvSpec("v_proj", "v_scale", "F32", (), "v"))


def quantization_config(
    quantized: Mapping[str, Scheme],
    kept: Iterable[str],
    *,
    kv_cache: str | None = None,
    embeddings: Iterable[str] = (),
) -> dict[str, Any]:
    """The `quantization_config` block of config.json."""
    return modelopt_blocks.quantization_config(_layers(quantized, (*kept, *embeddings)), _kv(kv_cache))


def extra_files(
    quantized: Mapping[str, Scheme],
    kept: Iterable[str],
    *,
    kv_cache: str | None = None,
    embeddings: Iterable[str] = (),
) -> dict[str, dict[str, Any]]:
    """hf_quant_config.json, which must agree with the block in config.json."""
    return {HF_QUANT_CONFIG: modelopt_blocks.hf_quant_config(_layers(quantized, (*kept, *embeddings)), _kv(kv_cache))}


def layer_format(scheme: Scheme) -> LayerFormat:
    """What nvidia-modelopt calls a scheme."""
    weights = scheme.weights
    smoothed = scheme.algorithm.name == "awq"
    match weights.format, weights.granularity:
        case "fp8", granularity:
            name = {"tensor": "fp8", "channel": "fp8_pc_pt", "block": "fp8_pb_wo"}[granularity]
        case "int8", _:
            name = "int8_sq" if scheme.inputs else "int8_wo"
        case "int4", _:
            name = "w4a8_awq" if scheme.inputs else "int4_awq"
        case "nvfp4", _:
            name = ("nvfp4_awq" if smoothed else "nvfp4") if scheme.inputs else "w4a16_nvfp4"
        case form, _:
            name = form if scheme.inputs or form != "mxfp4" else "w4a16_mxfp4"
    return LayerFormat(name, weights.group_size)


def _layers(quantized: Mapping[str, Scheme], kept: Iterable[str]) -> dict[str, LayerFormat | None]:
    known = {scheme: layer_format(scheme) for scheme in set(quantized.values())}
    return dict.fromkeys(kept) | {name: known[scheme] for name, scheme in quantized.items()}


def _kv(kv_cache: str | None) -> str | None:
    return kv_cache.upper() if kv_cache else None
