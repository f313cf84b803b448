"""Checks that a checkpoint folder passes on its own, without plan or source. Read-only, one process.

Each check returns faults, one sentence each; none means it passed. What is checked is what engines trip over:
an index that disagrees with its files, a scale of NaN or zero, a module that is quantized and excluded at once,
two JSON files that say different things.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from distribute.described import Described, read_described
from distribute.dialects.table import DIALECTS
from distribute.job import read_json
from distribute.layers import decoder_blocks
from distribute.recipe import matches
from distribute.scheme import Scheme
from distribute.source import (
    EMBEDDING_SUFFIXES,
    HEAD_SUFFIXES,
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    TensorEntry,
    read_entries,
)
from distribute.tensors import read_tensor

WEIGHT_SCALES = ("weight_scale", "weight_global_scale", "weight_scale_2")
INPUT_SCALES = ("input_scale", "input_global_scale")
SCALE_LEAVES = (*WEIGHT_SCALES, *INPUT_SCALES, "k_scale", "v_scale")


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
    described = _described(checkpoint)
    faults = []
    for module in sorted(quantized_modules(checkpoint)) if described else ():
        assert described is not None
        scheme = described.scheme_of(module)
        if scheme is not None:
            faults += _module_shape_faults(checkpoint, module, scheme, described.dialect)
    return faults


def _module_shape_faults(checkpoint: Checkpoint, module: str, scheme: Scheme, dialect: str) -> list[str]:
    name = next(spec.suffix for spec in DIALECTS[dialect].tensors((256, 256), scheme, "BF16"))
    weight = checkpoint.tensors.get(f"{module}.{name}")
    if weight is None or len(weight.shape) != 2:
        return [f"{module} has a scale but no 2-D {name}"]
    faults = []
    for spec in DIALECTS[dialect].tensors(_plain_shape(checkpoint, weight, scheme, dialect), scheme, "BF16"):
        found = checkpoint.tensors.get(f"{module}.{spec.suffix}")
        if found is None:
            faults.append(f"{module} has no {spec.suffix}")
        elif found.shape != spec.shape:
            faults.append(f"{found.name} has shape {list(found.shape)}, {dialect} has {list(spec.shape)} there")
    return faults


def _plain_shape(checkpoint: Checkpoint, weight: TensorEntry, scheme: Scheme, dialect: str) -> tuple[int, int]:
    """(out, in) of the weight that is stored so: as a dialect says, or in proportion."""
    said = weight.name.rpartition(".")[0] + ".weight_shape"
    if said in checkpoint.tensors:
        rows, columns = read_tensor(checkpoint, said).tolist()
        return rows, columns
    packed = DIALECTS[dialect].tensors((256, 256), scheme, "BF16")[0].shape
    return weight.shape[0] * 256 // packed[0], weight.shape[1] * 256 // packed[1]


def _described(checkpoint: Checkpoint) -> Described | None:
    block = checkpoint.config.get("quantization_config")
    return read_described(block) if isinstance(block, dict) else None


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
    return (
        faults
        + _set_faults(checkpoint, quantized, _described(checkpoint))
        + _json_faults(checkpoint.folder, block, ignore)
    )


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


def _set_faults(checkpoint: Checkpoint, quantized: set[str], described: Described | None) -> list[str]:
    """A module with stored input scales has one, and no other has."""
    have = {
        module
        for module, _, leaf in (name.rpartition(".") for name in checkpoint.tensors)
        if leaf in INPUT_SCALES
    }  # fmt: skip
    schemes = {module: described.scheme_of(module) for module in quantized} if described else {}
    static = {module for module, scheme in schemes.items() if scheme is not None and scheme.static_inputs}
    other = {module for module, scheme in schemes.items() if scheme is not None and not scheme.static_inputs}
    missing, surplus = sorted(static - have), sorted(other & have)
    faults = [f"no input_scale for {len(missing)} modules, for example {missing[0]}"] if missing else []
    return faults + ([f"input_scale of {surplus[0]} has no use: inputs are quantized at run time"] if surplus else [])


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
