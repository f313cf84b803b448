"""The compressed-tensors dialect, format `float-quantized`, as compressed-tensors 0.20.1 writes it. Torch-free.

Owns names, dtypes, shapes and JSON, not numbers. Read by vLLM and transformers.
"""

from collections.abc import Iterable
from typing import Any

from distribute.dialects.spec import PRODUCER, ShareGroups, TensorSpec, expert_input_groups
from distribute.recipe import Quantizer, Scheme

#: The compressed-tensors release whose format is written.
VERSION = "0.20.1"
FORMAT = "float-quantized"


def codec(scheme: Scheme) -> str:
    """Key of `distribute.numerics.fp8.CODECS` for the weights."""
    return f"fp8.compressed-tensors.{scheme.weights.granularity}"


def tensors(shape: tuple[int, int], scheme: Scheme, model_dtype: str) -> tuple[TensorSpec, ...]:
    """Stored tensors of a quantized linear layer with weight (out, in). No scale is 0-dim: loaders refuse it."""
    scale_shape = (shape[0], 1) if scheme.weights.granularity == "channel" else (1,)
    specs = [
        TensorSpec("weight", "F8_E4M3", shape, "weight"),
        TensorSpec("weight_scale", model_dtype, scale_shape, "weight_scale"),
    ]
    if scheme.needs_data:
        specs.append(TensorSpec("input_scale", model_dtype, (1,), "input_scale"))
    return tuple(specs)


def share_groups(modules: Iterable[str], scheme: Scheme) -> ShareGroups:
    """Nothing is shared, but an expert that saw no token must have an input scale all the same."""
    return ShareGroups(input_fallback=expert_input_groups(modules) if scheme.needs_data else ())


def quantization_config(
    quantized: Iterable[str], kept: Iterable[str], scheme: Scheme, *, embeddings: Iterable[str] = ()
) -> dict[str, Any]:
    """The `quantization_config` block of config.json.

    `ignore` holds exact names. An embedding is no Linear, so the group does not reach it and it is not listed.
    """
    group = {
        "targets": ["Linear"],
        "weights": _arguments(scheme.weights),
        "input_activations": _arguments(scheme.inputs, observer="static_minmax") if scheme.inputs else None,
        "output_activations": None,
        "format": FORMAT,
    }
    return {
        "version": VERSION,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "format": FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": sorted(kept),
        "moe_sparsity_config": None,
        "producer": dict(PRODUCER),
    }


def extra_files(
    quantized: Iterable[str], kept: Iterable[str], scheme: Scheme, *, embeddings: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """None: everything is in config.json."""
    return {}


def _arguments(quantizer: Quantizer, *, observer: str | None = None) -> dict[str, Any]:
    """QuantizationArgs of one operand; only a static input names its observer."""
    arguments: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "group_size": None,
        "strategy": quantizer.granularity,
        "dynamic": quantizer.dynamic,
    }
    return arguments | ({"observer": observer} if observer and not quantizer.dynamic else {})
