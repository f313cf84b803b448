"""Checks that a checkpoint folder passes on its own, without plan or source. Read-only, one process.

Each check returns faults, one sentence each; none means it passed. What is checked is what engines trip over:
an index that disagrees with its files, a scale of NaN or zero, a module that is quantized and excluded at once,
two JSON files that say different things.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from distribute.dialects.table import DIALECTS
from distribute.job import read_json
from distribute.layers import decoder_blocks
from distribute.recipe import PRESETS, Scheme, matches
from distribute.source import EMBEDDING_SUFFIXES, HEAD_SUFFIXES, INDEX_NAME, SINGLE_NAME, Checkpoint, read_entries
from distribute.tensors import read_tensor

WEIGHT_SCALES = ("weight_scale", "weight_global_scale", "weight_scale_2")
INPUT_SCALES = ("input_scale", "input_global_scale")
SCALE_LEAVES = (*WEIGHT_SCALES, *INPUT_SCALES, "k_scale", "v_scale")
#: quant_algo of modelopt checkpoints whose inputs have a stored scale.
STATIC_ALGOS = ("FP8", "NVFP4", "NVFP4_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL")


def check_folder(folder: Path) -> dict[str, list[str]]:
    """Faults by check name; all empty when the checkpoint is sound.

    Raises:
        SourceError: the folder holds no readable checkpoint at all.
    """
    checkpoint = Checkpoint.open(folder)
    checks: dict[str, Callable[[Checkpoint], list[str]]] = {
        "index": index_faults,
        "scales": scale_faults,
        "shapes": shape_faults,
        "config": config_faults,
    }
    return {name: check(checkpoint) for name, check in checks.items()}


def index_faults(checkpoint: Checkpoint) -> list[str]:
    """The index, the files in the folder and their headers must say the same."""
    folder = checkpoint.folder
    faults = [f"{name} is not named by the index" for name in checkpoint.skipped]
    index_path = folder / INDEX_NAME
    if not index_path.exists():
        return faults
    index = read_json(index_path)
    files = sorted(set(index["weight_map"].values()))
    stored = [entry for file in files for entry in read_entries(folder, file)]
    for entry in stored:
        if index["weight_map"].get(entry.name) != entry.file:
            faults.append(f"{entry.name} is stored in {entry.file}, where the index does not look for it")
    total = (index.get("metadata") or {}).get("total_size")
    if total != sum(entry.nbytes for entry in stored):
        faults.append(f"total_size is {total}, the tensors hold {sum(entry.nbytes for entry in stored)} bytes")
    expected = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    if files not in (expected, [SINGLE_NAME]):
        faults.append(f"weight files are not numbered 1 to {len(files)}: {', '.join(files[:5])}")
    return faults


def scale_faults(checkpoint: Checkpoint) -> list[str]:
    """Every stored scale must be finite and positive."""
    faults = []
    for name in checkpoint.tensors:
        if name.rpartition(".")[2] in SCALE_LEAVES:
            scale = read_tensor(checkpoint, name)
            if scale.dtype == torch.uint8:  # e8m0 exponents: 255 is NaN, every other byte is a power of two
                bad = scale == 255
            else:
                values = scale.float()
                bad = ~(torch.isfinite(values) & (values > 0))
            if bool(bad.any()):
                faults.append(f"{name}: {int(bad.sum())} of {scale.numel()} values are NaN, Inf, zero or negative")
    return faults


def shape_faults(checkpoint: Checkpoint) -> list[str]:
    """The tensors of a quantized layer must have the shapes of their dialect: strict loaders refuse others.

    Formats that this version does not write are passed over.
    """
    block = checkpoint.config.get("quantization_config")
    known = find_scheme(block) if isinstance(block, dict) else None
    if known is None:
        return []
    dialect, scheme = known
    faults = []
    for module in sorted(quantized_modules(checkpoint)):
        weight = checkpoint.tensors.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2:
            faults.append(f"{module} has a scale but no 2-D weight")
            continue
        rows, columns = weight.shape
        for spec in DIALECTS[dialect].tensors((rows, columns), scheme, "BF16"):
            found = checkpoint.tensors.get(f"{module}.{spec.suffix}")
            if found is not None and found.shape != spec.shape:
                faults.append(f"{found.name} has shape {list(found.shape)}, {dialect} has {list(spec.shape)} there")
    return faults


def find_scheme(block: Mapping[str, Any]) -> tuple[str, Scheme] | None:
    """(dialect, scheme) of a quantization_config, when it is one that this version writes."""
    for dialect, scheme in ((dialect, scheme) for dialect in DIALECTS for scheme in PRESETS.values()):
        own = DIALECTS[dialect].quantization_config(["layer"], [], scheme)
        if all(block.get(key) == own.get(key) for key in ("quant_method", "quant_algo", "format")):
            ours, theirs = (_operands(config) for config in (own, block))
            if not theirs or ours == theirs:
                return dialect, scheme
    return None


def config_faults(checkpoint: Checkpoint) -> list[str]:
    """Each linear module is quantized or excluded, never both or neither; both JSON files agree."""
    block = checkpoint.config.get("quantization_config")
    if not isinstance(block, dict):
        return ["config.json has no quantization_config"]
    ignore = [str(pattern) for pattern in block.get("ignore") or block.get("exclude_modules") or []]
    quantized = quantized_modules(checkpoint)
    linears = plain_linears(checkpoint, quantized)
    faults = []
    for module in sorted(quantized):
        if hits := [pattern for pattern in ignore if matches(pattern, module)]:
            faults.append(f"{module} carries quantized tensors but {hits[0]} excludes it")
    faults += [
        f"{module} is stored plain but nothing excludes it"
        for module in sorted(linears)
        if not any(matches(pattern, module) for pattern in ignore)
    ]
    return faults + _set_faults(checkpoint, quantized, block) + _json_faults(checkpoint.folder, block, ignore)


def quantized_modules(checkpoint: Checkpoint) -> set[str]:
    """Modules that carry a weight scale."""
    parts = (name.rpartition(".") for name in checkpoint.tensors)
    return {module for module, _, leaf in parts if leaf in WEIGHT_SCALES}


def plain_linears(checkpoint: Checkpoint, quantized: set[str]) -> set[str]:
    """Modules with a plain 2-D weight that a runtime holds as a linear layer: in a decoder block, or a head."""
    blocks = decoder_blocks(checkpoint.tensors, checkpoint.config)
    found = set()
    for name, entry in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if module == name or len(entry.shape) != 2 or module in quantized or name.endswith(EMBEDDING_SUFFIXES):
            continue
        if name.endswith(HEAD_SUFFIXES) or any(name.startswith(f"{prefix}.") for prefix in blocks):
            found.add(module)
    return found


def _set_faults(checkpoint: Checkpoint, quantized: set[str], block: Mapping[str, Any]) -> list[str]:
    """Static recipes: every quantized module has an input scale. Others: none has."""
    have = {
        module
        for module, _, leaf in (name.rpartition(".") for name in checkpoint.tensors)
        if leaf in INPUT_SCALES
    }  # fmt: skip
    if is_static(block):
        missing = sorted(quantized - have)
        return [f"no input_scale for {len(missing)} modules, for example {missing[0]}"] if missing else []
    surplus = sorted(have)
    return [f"input_scale of {surplus[0]} has no use: inputs are quantized at run time"] if surplus else []


def is_static(block: Mapping[str, Any]) -> bool:
    """Whether a quantization_config asks for stored input scales."""
    if block.get("quant_method") == "modelopt":
        return block.get("quant_algo") in STATIC_ALGOS
    groups = (block.get("config_groups") or {}).values()
    inputs = [group.get("input_activations") for group in groups]
    return any(args is not None and args.get("dynamic") in (False, "local") for args in inputs)


def _json_faults(folder: Path, block: Mapping[str, Any], ignore: list[str]) -> list[str]:
    path = folder / "hf_quant_config.json"
    if block.get("quant_method") != "modelopt":
        return [f"{path.name} is of another dialect than config.json"] if path.exists() else []
    if not path.exists():
        return [f"{path.name} is missing"]
    other = read_json(path)["quantization"]
    faults = []
    if other.get("quant_algo") != block.get("quant_algo"):
        faults.append(
            f"quant_algo is {block.get('quant_algo')} in config.json, {other.get('quant_algo')} in {path.name}"
        )
    if sorted(other.get("exclude_modules") or []) != sorted(ignore):
        faults.append(f"config.json and {path.name} exclude different modules")
    return faults


def _operands(block: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What each group says of its operands, as far as it decides shapes."""
    keys = [(o, f) for o in ("weights", "input_activations") for f in ("num_bits", "type", "strategy", "dynamic")]
    groups = (block.get("config_groups") or {}).values()
    return [tuple((group.get(operand) or {}).get(field) for operand, field in keys) for group in groups]
