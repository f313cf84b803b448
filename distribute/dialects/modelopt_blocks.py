"""The two JSON descriptions of a ModelOpt checkpoint: hf_quant_config.json and the quantization block of config.json.

Owns the words for every format, and which modules are named as left out; a function of module names and formats.
Torch-free. The words are those of nvidia-modelopt 0.47, or of 0.48 where 0.47 is at fault: capitals and a group size
for block FP8 and MX formats, a group size at the top of the block (SGLang assumes 16 without), what is left out of a
mixed checkpoint, and inputs called dynamic where they are.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distribute.dialects.spec import PRODUCER
from distribute.errors import UserError

MIXED = "MIXED_PRECISION"
HF_QUANT_CONFIG = "hf_quant_config.json"
_SMOOTHED = {"has_zero_point": False, "pre_quant_scale": True}


@dataclass(frozen=True)
class LayerFormat:
    """How one module is stored: nvidia-modelopt's name of the format; inputs that share a scale, 0 without groups."""

    id: str
    group_size: int = 0


@dataclass(frozen=True)
class _Words:
    """What a format is called. `operands(group_size)`: what is said of inputs and weights in a config group.

    `alone`: whether a checkpoint that has only this format has a config group.
    """

    algo: str
    operands: Callable[[int], dict[str, Any]]
    grouped: bool = False
    smoothed: bool = False
    alone: bool = True


def _number(bits: int, kind: str = "float", *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"dynamic": dynamic, "num_bits": bits, "type": kind, **more}


def _both(inputs: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    return {"input_activations": inputs, "weights": weights}


def _mx(bits: int, size: int) -> dict[str, Any]:
    more: dict[str, Any] = {"group_size": size, "strategy": "group"}
    return _both(_number(bits, dynamic=True, **more), _number(bits, **more))


def _fp4_of_fp8(size: int) -> dict[str, Any]:
    return _both(_number(8), _number(4, group_size=size))


def _awq(size: int) -> dict[str, Any]:
    return _both(_number(8, group_size=size), _number(4, group_size=size))


def _nvfp4(size: int) -> dict[str, Any]:
    return _both(_number(4, group_size=size), _number(4, group_size=size))


_WORDS = {
    "fp8": _Words("FP8", lambda size: _both(_number(8), _number(8))),
    "fp8_pc_pt": _Words(
        "FP8_PER_CHANNEL_PER_TOKEN",
        lambda size: _both(_number(8, dynamic=True, strategy="token"), _number(8, strategy="channel")),
        alone=False,  # as 0.47: engines go by the algorithm
    ),
    "fp8_pb_wo": _Words(
        "FP8_PB_WO", lambda size: {"weights": _number(8, strategy="block", block_structure=[size, size])},
        grouped=True,
    ),
    "nvfp4": _Words("NVFP4", _nvfp4, grouped=True),
    "w4a16_nvfp4": _Words("W4A16_NVFP4", lambda size: {"weights": _number(4, group_size=size)}, grouped=True),
    "nvfp4_svdquant": _Words("NVFP4_SVD", lambda size: _nvfp4(size) | _SMOOTHED, grouped=True, smoothed=True),
    "nvfp4_awq": _Words("NVFP4_AWQ", _awq, grouped=True, smoothed=True, alone=False),
    "w4a8_nvfp4_fp8": _Words("W4A8_NVFP4_FP8", _fp4_of_fp8, grouped=True),
    "w4a8_mxfp4_fp8": _Words("W4A8_MXFP4_FP8", _fp4_of_fp8, grouped=True),
    "mxfp4": _Words("MXFP4", lambda size: _mx(4, size), grouped=True),
    "w4a16_mxfp4": _Words("W4A16_MXFP4", lambda size: {"weights": _mx(4, size)["weights"]}, grouped=True),
    "mxfp8": _Words("MXFP8", lambda size: _mx(8, size), grouped=True),
    "int4_awq": _Words(
        "W4A16_AWQ", lambda size: {"weights": _number(4, "int", group_size=size)},
        grouped=True, smoothed=True, alone=False,
    ),
    "w4a8_awq": _Words("W4A8_AWQ", _awq, grouped=True, smoothed=True, alone=False),
    "int8_wo": _Words("W8A16", lambda size: {"weights": _number(8, "int")}, alone=False),
    "int8_sq": _Words(
        "W8A8_SQ_PER_CHANNEL",
        lambda size: _both(_number(8, "int"), _number(8, "int", strategy="channel")), alone=False,
    ),
}  # fmt: skip


def hf_quant_config(layers: Mapping[str, LayerFormat | None], kv_cache: str | None = None) -> dict[str, Any]:
    """The content of hf_quant_config.json (written with `indent=4`).

    Args:
        layers: every module that is stored in a format, and (None) every one that a loader could take for such.
        kv_cache: "FP8", "NVFP4", "NVFP4_AFFINE" or None.

    Raises:
        UserError: a format has no name that loaders know.
    """
    formats = {name: layer for name, layer in layers.items() if layer}
    kept = [name for name, layer in layers.items() if not layer]
    quantization: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": kv_cache}
    distinct = dict.fromkeys(formats.values())
    if len(distinct) == 1:
        quantization |= _layer_config(next(iter(distinct)))
    else:
        quantization |= {"quant_algo": MIXED} if distinct else {}
        quantization["quantized_layers"] = {name: _layer_config(layer) for name, layer in formats.items()}
    if distinct:
        quantization["exclude_modules"] = exclude_modules(formats, kept)
    return {"producer": dict(PRODUCER), "quantization": quantization}


def quantization_config(layers: Mapping[str, LayerFormat | None], kv_cache: str | None = None) -> dict[str, Any]:
    """The `quantization_config` block of config.json; arguments and errors as of `hf_quant_config`."""
    quantization = hf_quant_config(layers, kv_cache)["quantization"]
    algo, size = quantization["quant_algo"], quantization.get("group_size")
    groups = _config_groups({name: layer for name, layer in layers.items() if layer}, mixed=algo == MIXED)
    return {
        **({"config_groups": groups} if groups else {}),
        **({"quantized_layers": quantization["quantized_layers"]} if algo == MIXED else {}),
        "ignore": quantization.get("exclude_modules", []),
        **({"quant_algo": algo} if algo else {}),
        **({"group_size": size} if size else {}),
        **({"kv_cache_scheme": _number(8) if kv_cache == "FP8" else kv_cache} if kv_cache else {}),
        "producer": dict(PRODUCER),
        "quant_method": "modelopt",
    }


def exclude_modules(quantized: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Patterns, sorted, that match every kept module and no quantized one.

    Each kept name is shortened to its shortest dotted prefix P for which `P*` matches no quantized module, else
    `P.*` if that matches none and P is not quantized itself, else the exact name.
    """
    names = sorted(quantized)
    return sorted({_shorten(name, names) for name in kept})


def _layer_config(layer: LayerFormat) -> dict[str, Any]:
    words = _words(layer)
    return {
        "quant_algo": words.algo,
        **({"group_size": layer.group_size} if words.grouped else {}),
        **(_SMOOTHED if words.smoothed else {}),
    }


def _config_groups(formats: Mapping[str, LayerFormat], *, mixed: bool) -> dict[str, Any]:
    """One group a format, in the order of first appearance."""
    targets: dict[LayerFormat, list[str]] = defaultdict(list)
    for name, layer in formats.items():
        targets[layer].append(name)
    return {
        f"group_{index}": {
            **_words(layer).operands(layer.group_size),
            "targets": sorted(names) if mixed else ["Linear"],
        }
        for index, (layer, names) in enumerate(targets.items())
        if mixed or _words(layer).alone
    }


def _words(layer: LayerFormat) -> _Words:
    if layer.id not in _WORDS:
        raise UserError(f"format {layer.id} has no name that loaders know; these have: {', '.join(_WORDS)}")
    return _WORDS[layer.id]


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
