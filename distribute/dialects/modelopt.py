"""The ModelOpt dialect: what nvidia-modelopt 0.47's `export_hf_checkpoint` writes, for vLLM, SGLang, TensorRT-LLM.

Owns names, dtypes, shapes and JSON, not numbers. Torch-free.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from distribute.dialects.spec import (
    PRODUCER,
    ShareGroups,
    TensorSpec,
    expert_gate_up_groups,
    expert_input_groups,
)
from distribute.recipe import Scheme

#: quant_algo by granularity of the weight scale.
_ALGO = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN"}


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
    operand = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": dict(operand), "weights": dict(operand), "targets": ["Linear"]}
    algo = _ALGO[scheme.weights.granularity]
    return {
        **({"config_groups": {"group_0": group}} if algo == "FP8" else {}),
        "ignore": exclude_modules(quantized, (*kept, *embeddings)),
        "quant_algo": algo,
        "producer": dict(PRODUCER),
        "quant_method": "modelopt",
    }


def extra_files(
    quantized: Iterable[str], kept: Iterable[str], scheme: Scheme, *, embeddings: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """hf_quant_config.json, which must agree with the block in config.json."""
    quantization = {
        "quant_algo": _ALGO[scheme.weights.granularity],
        "kv_cache_quant_algo": None,
        "exclude_modules": exclude_modules(quantized, (*kept, *embeddings)),
    }
    return {"hf_quant_config.json": {"producer": dict(PRODUCER), "quantization": quantization}}


def exclude_modules(quantized: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Patterns, sorted, that match every kept module and no quantized one.

    Each kept name is shortened to its shortest dotted prefix P for which `P*` matches no quantized module, else
    `P.*` if that matches none and P is not quantized itself, else the exact name.
    """
    names = sorted(quantized)
    return sorted({_shorten(name, names) for name in kept})


def _shorten(name: str, quantized: list[str]) -> str:
    dots = (i for i, character in enumerate(name) if character == ".")
    for prefix in (name[:i] for i in dots):
        if not _any_startswith(prefix, quantized):
            return prefix + "*"
        if not _any_startswith(prefix + ".", quantized) and not _contains(prefix, quantized):
            return prefix + ".*"
    return name


def _any_startswith(prefix: str, names: list[str]) -> bool:
    i = bisect_left(names, prefix)
    return i < len(names) and names[i].startswith(prefix)


def _contains(name: str, names: list[str]) -> bool:
    i = bisect_left(names, name)
    return i < len(names) and names[i] == name
