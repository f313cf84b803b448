"""What the compressors of compressed-tensors 0.20.1 make of the golden sources, module by module.

They calibrate nothing: ranges of weights are taken as its own observers do, those of inputs and of keys and values are
given. Layers that engines fuse share the scale of the whole weight, as llm-compressor has it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    generate_gparam,
    maybe_pad_tensor_for_block_quant,
)
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.golden import GOLDEN
from tests.oracle.golden_files import empty, source_tensors, write_json

DENSE = ("llama", "qwen2", "qwen3", "mixtral")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True)
class Preset:
    """A scheme of the reference by name, the format that is asked for, and the cases."""

    scheme: str
    format: str
    cases: tuple[str, ...]
    weight_only: bool = False
    group_size: int = 0
    kv: bool = False

    def make_scheme(self) -> QuantizationScheme:
        scheme = preset_name_to_scheme(self.scheme, ["Linear"]).model_copy(deep=True)
        scheme.format = self.format
        if self.weight_only:
            scheme.input_activations = None
        if self.group_size:
            scheme.weights.group_size = self.group_size
        return scheme


PRESETS: dict[str, Preset] = {
    "fp8": Preset("FP8", "float-quantized", (*DENSE, "zeros")),
    "fp8_dynamic": Preset("FP8_DYNAMIC", "float-quantized", DENSE),
    "fp8_block": Preset("FP8_BLOCK", "float-quantized", ("wide", "llama", "zeros")),
    "int8": Preset("W8A8", "int-quantized", ("llama", "zeros")),
    "int8_weight_only": Preset("W8A8", "pack-quantized", ("llama",), weight_only=True),
    "int4": Preset("W4A16", "pack-quantized", ("wide",)),
    "int4-32": Preset("W4A16", "pack-quantized", ("llama", "zeros"), group_size=32),
    "int4_asymmetric": Preset("W4A16_ASYM", "pack-quantized", ("wide",)),
    "int4_asymmetric-32": Preset("W4A16_ASYM", "pack-quantized", ("llama", "zeros"), group_size=32),
    "nvfp4": Preset("NVFP4", "nvfp4-pack-quantized", ("llama", "qwen2", "mixtral", "zeros")),
    "nvfp4_weight_only": Preset("NVFP4A16", "nvfp4-pack-quantized", ("llama",)),
    "mxfp4": Preset("MXFP4", "mxfp4-pack-quantized", ("llama", "qwen2", "zeros")),
    "mxfp8": Preset("MXFP8", "mxfp8-quantized", ("llama", "qwen2", "zeros")),
    "fp8-kv_fp8": Preset("FP8", "float-quantized", ("qwen3",), kv=True),
}


def make_all() -> None:
    """Every preset of every case."""
    for name, preset in PRESETS.items():
        for case in preset.cases:
            make(case, name, preset)


def make(case: str, name: str, preset: Preset) -> None:
    """The compressor, module by module; static input scales from given values."""
    scheme = preset.make_scheme()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    weights = source_tensors(case)
    modules = [
        name.removesuffix(".weight")
        for name in sorted(weights)
        if name.endswith("_proj.weight") or ".experts." in name
    ]
    static = scheme.input_activations is not None and scheme.input_activations.dynamic in (False, "local")
    given = {module: 0.37 * index for index, module in enumerate(modules)} if static else {}
    globals_ = _shared_globals(weights, modules) if "nvfp4" in preset.format else {}
    out: dict[str, torch.Tensor] = {}
    for module in modules:
        state = _with_qparams(weights[f"{module}.weight"], scheme, given.get(module), globals_.get(module))
        out |= {f"{module}.{suffix}": tensor for suffix, tensor in compressor.compress(state, scheme).items()}
    folder = empty(GOLDEN / case / f"compressed-tensors-{name}")
    kv = preset_name_to_scheme("FP8", []).input_activations if preset.kv else None
    if kv:
        kv_absmax = {m: 0.53 * (i + 1) for i, m in enumerate(_attentions(modules))}
        out |= _kv_scales(kv_absmax, kv)
        write_json(folder / "kv_absmax.json", kv_absmax)
    save_file(out, folder / "tensors.safetensors")
    write_json(folder / "quantization_config.json", _config(case, scheme, kv))
    if given:
        write_json(folder / "input_absmax.json", given)


def _with_qparams(
    weight: torch.Tensor, scheme: QuantizationScheme, input_absmax: float | None, global_scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """A module's state before compression: scales and zero points, as its own initialization has them."""
    args = scheme.weights
    low, high = _ranges(weight, args)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    if global_scale is not None:
        state["weight_global_scale"] = global_scale
    if input_absmax is None:
        return state
    absmax = torch.tensor(input_absmax, dtype=weight.dtype)
    if global_scale is not None:
        return state | {"input_global_scale": generate_gparam(-absmax, absmax)}
    scale, zero_point = calculate_qparams(-absmax, absmax, scheme.input_activations)
    return state | {"input_scale": scale, "input_zero_point": zero_point}


def _ranges(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest value of all that share a scale, in the shape of the scales."""
    match args.strategy:
        case "tensor":
            return torch.amin(weight), torch.amax(weight)
        case "channel":
            return torch.amin(weight, dim=1, keepdim=True), torch.amax(weight, dim=1, keepdim=True)
        case "block":
            height, width = args.block_structure
            padded = maybe_pad_tensor_for_block_quant(weight, (height, width))
            blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
            return torch.amin(blocks, dim=(1, 3)), torch.amax(blocks, dim=(1, 3))
        case _:
            groups = weight.unflatten(1, (-1, args.group_size))
            return torch.amin(groups, dim=2), torch.amax(groups, dim=2)


def _shared_globals(weights: dict[str, torch.Tensor], modules: Iterable[str]) -> dict[str, torch.Tensor]:
    """The global scale of each module: that of the largest magnitude in all layers that engines fuse with it.

    llm-compressor takes the least of their own scales. This is the same, but where one of them is (nearly) all zero:
    the 1.0 that stands for no scale would be the least.
    """
    leaves = {leaf: group for group in FUSED for leaf in group}

    def largest(module: str) -> torch.Tensor:
        block, _, leaf = module.rpartition(".")
        fused = [f"{block}.{other}.weight" for other in leaves.get(leaf, (leaf,))]
        return torch.stack([weights[name].abs().max() for name in fused]).max()

    return {module: generate_gparam(-largest(module), largest(module)) for module in modules}


def _attentions(modules: Iterable[str]) -> list[str]:
    return sorted({m.removesuffix(".k_proj") for m in modules if m.endswith(".k_proj")})


def _kv_scales(absmax: dict[str, float], args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Scales of keys and of values: the given range, and twice of it."""
    scales = {}
    for module, value in absmax.items():
        for name, factor in (("k_scale", 1), ("v_scale", 2)):
            high = torch.tensor(value * factor, dtype=torch.bfloat16)
            scales[f"{module}.{name}"], _ = calculate_qparams(-high, high, args)
    return scales


def _config(case: str, scheme: QuantizationScheme, kv: QuantizationArgs | None) -> dict[str, Any]:
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(**scheme.model_dump())},
        format=scheme.format,
        quantization_status="compressed",
        kv_cache_scheme=kv,
        ignore=_ignored_by_reference(case, scheme),
    )
    return config.model_dump(mode="json")


def _ignored_by_reference(case: str, scheme: QuantizationScheme) -> list[str]:
    """The names listed as ignored when every linear layer but the head carries the scheme."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / case / "source", dtype="auto")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.quantization_scheme = scheme
            module.quantization_status = QuantizationStatus.COMPRESSED
    found = QuantizationConfig.from_pretrained(model, format=scheme.format)
    assert found is not None and found.ignore is not None
    return found.ignore
