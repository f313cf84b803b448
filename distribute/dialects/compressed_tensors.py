"""The compressed-tensors dialect, as compressed-tensors 0.20.1 writes it. Torch-free.

Owns names, dtypes, shapes, JSON and who shares a scale, not numbers. Read by vLLM and transformers. Every group and
the whole name their format: a reader that guesses takes the wrong one for some.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import ceil
from typing import Any

from distribute.dialects.spec import (
    PRODUCER,
    KvSpec,
    ShareGroups,
    TensorSpec,
    expert_input_groups,
    same_input_groups,
)
from distribute.scheme import Quantizer, Scheme

#: The compressed-tensors release whose format is written.
VERSION = "0.20.1"
MIXED = "mixed-precision"
_FORMATS = {
    "fp8": "float-quantized",
    "int8": "int-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
}
#: dtype of the codes; whether two share a byte; dtype of scales of groups, where it is not the model's.
_LAYOUTS: dict[str, tuple[str, bool, str | None]] = {
    "fp8": ("F8_E4M3", False, None),
    "int8": ("I8", False, None),
    "nvfp4": ("U8", True, "F8_E4M3"),
    "mxfp4": ("U8", True, "U8"),
    "mxfp8": ("F8_E4M3", False, "U8"),
}
_SCALE_DTYPES = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8", "mxfp8": "torch.uint8"}


def codec(scheme: Scheme) -> str:
    """Key for `distribute.numerics.table.find_codec`."""
    weights = scheme.weights
    form = f"{weights.format}_packed" if _is_packed(scheme) and weights.format == "int8" else weights.format
    size = weights.group_size if weights.granularity == "group" else weights.granularity
    return f"{form}.compressed-tensors.{size}{'' if weights.symmetric else '.asymmetric'}"


def tensors(
    shape: tuple[int, int], scheme: Scheme, model_dtype: str, *, smoothed: bool = False
) -> tuple[TensorSpec, ...]:
    """Stored tensors of a quantized linear layer with weight (out, in). No scale is 0-dim: loaders refuse it."""
    assert not smoothed, "this dialect stores no smoothing"
    of_weight = _packed_tensors if _is_packed(scheme) else _weight_tensors
    specs = list(of_weight(*shape, scheme, model_dtype))
    if scheme.static_inputs:
        assert scheme.inputs is not None
        nvfp4 = scheme.inputs.format == "nvfp4"
        specs.append(
            TensorSpec("input_global_scale" if nvfp4 else "input_scale", "F32" if nvfp4 else model_dtype, (1,))
        )
    return tuple(specs)


def _weight_tensors(rows: int, columns: int, scheme: Scheme, model_dtype: str) -> Iterator[TensorSpec]:
    weights = scheme.weights
    size = weights.group_size
    dtype, halved, scale_dtype = _LAYOUTS[weights.format]
    yield TensorSpec("weight_packed" if halved else "weight", dtype, (rows, columns // (2 if halved else 1)), 1)
    match weights.granularity:
        case "tensor":
            yield TensorSpec("weight_scale", model_dtype, (1,))
        case "block":
            yield TensorSpec("weight_scale", model_dtype, (ceil(rows / size), ceil(columns / size)), size)
        case _:
            groups = columns // size if size else 1
            yield TensorSpec("weight_scale", scale_dtype or model_dtype, (rows, groups), 1)
    if weights.format == "nvfp4":
        yield TensorSpec("weight_global_scale", "F32", (1,))


def _packed_tensors(rows: int, columns: int, scheme: Scheme, model_dtype: str) -> Iterator[TensorSpec]:
    """Dense little-endian bits in 32-bit words, along a row; zero points along the rows."""
    weights = scheme.weights
    groups = columns // weights.group_size if weights.group_size else 1
    yield TensorSpec("weight_packed", "I32", (rows, ceil(columns * weights.bits / 32)), 1)
    yield TensorSpec("weight_scale", model_dtype, (rows, groups), 1)
    yield TensorSpec("weight_shape", "I64", (2,))
    if not weights.symmetric:
        per = 32 // weights.bits
        yield TensorSpec("weight_zero_point", "I32", (ceil(rows / per), groups), per)


def share_groups(schemes: Mapping[str, Scheme]) -> ShareGroups:
    """NVFP4 layers that engines fuse share the scale of the whole weight. No input is shared.

    But an expert that saw no token must have an input scale all the same.
    """
    static = [name for name, scheme in schemes.items() if scheme.static_inputs]
    nvfp4 = [name for name, scheme in schemes.items() if scheme.weights.format == "nvfp4"]
    return ShareGroups(weight=same_input_groups(nvfp4), input_fallback=expert_input_groups(static))


def kv_tensors(kv_cache: str, model_dtype: str) -> tuple[KvSpec, ...]:
    """Scales (1,) in the model's dtype on the attention module itself."""
    return (KvSpec("", "k_scale", model_dtype, (1,), "k"), KvSpec("", "v_scale", model_dtype, (1,), "v"))


def quantization_config(
    quantized: Mapping[str, Scheme],
    kept: Iterable[str],
    *,
    kv_cache: str | None = None,
    embeddings: Iterable[str] = (),
) -> dict[str, Any]:
    """The `quantization_config` block of config.json.

    `ignore` holds exact names. An embedding is no Linear, so the group does not reach it and it is not listed.
    """
    schemes = dict.fromkeys(_as_stored(scheme) for scheme in quantized.values())
    formats = {_format(scheme) for scheme in schemes}
    groups = {}
    for index, scheme in enumerate(schemes):
        names = [name for name, other in quantized.items() if _as_stored(other) == scheme]
        groups[f"group_{index}"] = _group(scheme, ["Linear"] if len(schemes) == 1 else sorted(names))
    return {
        "version": VERSION,
        "quant_method": "compressed-tensors",
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": groups,
        "kv_cache_scheme": _kv_scheme() if kv_cache else None,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": sorted(kept),
        "moe_sparsity_config": None,
        "producer": dict(PRODUCER),
    }


def extra_files(
    quantized: Mapping[str, Scheme],
    kept: Iterable[str],
    *,
    kv_cache: str | None = None,
    embeddings: Iterable[str] = (),
) -> dict[str, dict[str, Any]]:
    """None: everything is in config.json."""
    return {}


def _as_stored(scheme: Scheme) -> Scheme:
    """A scheme without what leaves no trace in the files."""
    return Scheme(weights=scheme.weights, inputs=scheme.inputs)


def _is_packed(scheme: Scheme) -> bool:
    """Integers are packed where only weights are quantized."""
    return scheme.weights.format == "int4" or (scheme.weights.format == "int8" and scheme.inputs is None)


def _format(scheme: Scheme) -> str:
    return "pack-quantized" if _is_packed(scheme) else _FORMATS[scheme.weights.format]


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    return {
        "targets": targets,
        "weights": _arguments(scheme.weights),
        "input_activations": _arguments(scheme.inputs, is_input=True) if scheme.inputs else None,
        "output_activations": None,
        "format": _format(scheme),
    }


def _arguments(quantizer: Quantizer, *, is_input: bool = False) -> dict[str, Any]:
    """QuantizationArgs of one operand; only a static input names its observer."""
    nvfp4, block = quantizer.format == "nvfp4", quantizer.granularity == "block"
    arguments: dict[str, Any] = {
        "num_bits": quantizer.bits,
        "type": "int" if quantizer.format.startswith("int") else "float",
        "symmetric": quantizer.symmetric,
        "group_size": quantizer.group_size if quantizer.granularity == "group" else None,
        "strategy": "tensor_group" if nvfp4 else quantizer.granularity,
        **({"block_structure": [quantizer.group_size] * 2} if block else {}),
        # NVFP4 inputs: one stored scale for all, and one a group that the engine computes
        "dynamic": "local" if nvfp4 and is_input else quantizer.dynamic,
    }
    if dtype := _SCALE_DTYPES.get(quantizer.format):
        arguments["scale_dtype"] = dtype
    return arguments | ({"observer": "static_minmax"} if is_input and not quantizer.dynamic else {})


def _kv_scheme() -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "group_size": None,
        "strategy": "tensor",
        "dynamic": False,
        "observer": "static_minmax",
    }
