"""What is quantized: by structure and tables, from names and shapes on disk. Torch-free.

A module is a candidate when it has a 2-D weight. It is quantized when it is a linear layer inside a decoder
block and no pattern leaves it out. Runtimes fuse q/k/v and gate/up into one matrix and all experts into one
tensor, so these are quantized or kept together. Names are those stored in the source files, because these are
the names that engines meet.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import Any

from distribute.errors import RecipeError, SourceError
from distribute.recipe import DEFAULT_IGNORE, Recipe, matches
from distribute.scheme import GROUP_SIZES
from distribute.source import Checkpoint, TensorEntry, text_config

QUANTIZE = "quantize"
KEEP = "keep"
FLOAT_DTYPES = ("BF16", "F16", "F32")
#: Leaf names of linear layers that runtimes load as one matrix.
FUSED_LEAVES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
#: Leaf names of projections that make keys.
KV_LEAVES = ("k_proj", "qkv_proj", "query_key_value")
#: Where config.json says how many decoder blocks there are.
NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_EXPERT = re.compile(r"^(?P<block>.*\.experts)\.(?P<index>\d+)\.(?P<leaf>\w+)$")
_IGNORED = re.compile("|".join(map(translate, DEFAULT_IGNORE)))  # whether one of many patterns matches
_NUMBER = re.compile(r"\d+")
_NUMBERED = re.compile(r"^(?P<prefix>\D*?)\.(?P<index>\d+)\.(?P<rest>.+)$")


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one module, and why. `preset` and `group_size` (of int4) say how a quantized one is coded."""

    module: str
    action: str  # QUANTIZE or KEEP
    reason: str
    preset: str = ""
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where a linear layer's weight (out, in) lies: rows from `first_row` on of a source tensor seen as a matrix."""

    source: str
    first_row: int
    shape: tuple[int, int]


@dataclass(frozen=True)
class Expert:
    """Where an expert's linear layer stands: `block` holds all experts of one layer."""

    block: str
    index: int
    leaf: str


def decide(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, Decision]:
    """The decision for every module with a 2-D weight, by module name as stored on disk.

    Raises:
        RecipeError: a pattern names nothing, splits what runtimes fuse, or leaves nothing to quantize; or a shape
            does not fit the format.
        SourceError: a weight that should be quantized is not a float, or experts are stored as one 3-D tensor.
    """
    modules = {name.removesuffix(".weight"): entry for name, entry in checkpoint.tensors.items() if _is_matrix(entry)}
    _refuse_unmatched(recipe, checkpoint.tensors, modules)
    blocks = decoder_blocks(checkpoint.tensors, checkpoint.config)
    decisions = {module: _decide(module, blocks, recipe) for module in modules}
    quantized = [module for module, decision in decisions.items() if decision.action == QUANTIZE]
    if not quantized:
        raise RecipeError("nothing would be quantized: no linear layer in a decoder block is left by the recipe")
    _refuse_fused_experts(checkpoint.tensors, recipe, blocks)
    _refuse_dtype(quantized, modules)
    shapes = {module: (modules[module].shape[0], modules[module].shape[1]) for module in quantized}
    decisions |= _with_presets(decisions, shapes, recipe)
    _refuse_split(quantized, decisions)
    return decisions


def decoder_blocks(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, int]:
    """Prefixes of numbered decoder blocks ("model.layers") and how many blocks the model has there.

    A numbered list is one of decoder blocks when it has at least as many entries as config.json says; entries
    beyond that number belong to multi-token prediction.

    Raises:
        SourceError: config.json does not say how many layers there are, or no list is that long.
    """
    text = text_config(config)
    count = next((text[key] for key in NUM_LAYERS_KEYS if isinstance(text.get(key), int)), None)
    if count is None:
        raise SourceError(f"config.json does not say how many layers there are; expected one of {NUM_LAYERS_KEYS}")
    indices: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if found := _NUMBERED.match(name):
            indices[found["prefix"]].add(int(found["index"]))
    blocks = {prefix: count for prefix, seen in indices.items() if seen >= set(range(count))}
    if not blocks:
        raise SourceError(f"no list of {count} decoder blocks (like model.layers.0 ...) is in the weight names")
    return blocks


def expert_of(module: str) -> Expert | None:
    """The expert that a module like `model.layers.0.mlp.experts.3.up_proj` belongs to."""
    found = _EXPERT.match(module)
    return Expert(found["block"], int(found["index"]), found["leaf"]) if found else None


def matrix_of(module: str, tensors: Mapping[str, TensorEntry]) -> Matrix:
    """The weight of a module that `decide` knows."""
    entry = tensors[f"{module}.weight"]
    return Matrix(entry.name, 0, (entry.shape[0], entry.shape[1]))


def attention_modules(checkpoint: Checkpoint) -> list[str]:
    """Modules in decoder blocks that cache keys and values, in natural order: by their projections."""
    blocks = decoder_blocks(checkpoint.tensors, checkpoint.config)
    found = set()
    for name in checkpoint.tensors:
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        place = _NUMBERED.match(parent)
        if leaf in KV_LEAVES and place and int(place["index"]) < blocks.get(place["prefix"], 0):
            found.add(parent)
    return sorted(found, key=natural_key)


def fused_siblings(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups (of two or more present modules) that runtimes load as one matrix, in natural order."""
    present = set(modules)
    parents = sorted({module.rpartition(".")[0] for module in present}, key=natural_key)
    groups = []
    for leaves in FUSED_LEAVES:
        for parent in parents:
            group = tuple(f"{parent}.{leaf}" for leaf in leaves if f"{parent}.{leaf}" in present)
            if len(group) > 1:
                groups.append(group)
    return groups


def natural_key(name: str) -> str:
    """Sort key that orders `layers.2` before `layers.10`: a number as its length and its digits, before any text."""
    return _NUMBER.sub(_sortable, name)


def _sortable(number: re.Match[str]) -> str:
    digits = str(int(number[0]))
    return f"\0{chr(len(digits))}{digits}"


def _is_matrix(entry: TensorEntry) -> bool:
    return entry.name.endswith(".weight") and len(entry.shape) == 2 and min(entry.shape) > 0


def _decide(module: str, blocks: Mapping[str, int], recipe: Recipe) -> Decision:
    for pattern in recipe.ignore:
        if matches(pattern, module):
            return Decision(module, KEEP, f"recipe ignores {pattern}")
    for pattern in recipe.include:
        if matches(pattern, module):
            return Decision(module, QUANTIZE, f"recipe includes {pattern}")
    for pattern, what in DEFAULT_IGNORE.items() if _IGNORED.match(module) else ():
        if matches(pattern, module):
            return Decision(module, KEEP, f"{what}, left by default ({pattern})")
    found = _NUMBERED.match(module)
    if found is None or found["prefix"] not in blocks:
        return Decision(module, KEEP, "outside the decoder blocks")
    if int(found["index"]) >= blocks[found["prefix"]]:
        return Decision(module, KEEP, "beyond the last decoder block (multi-token prediction)")
    return Decision(module, QUANTIZE, "linear layer in a decoder block")


def _refuse_unmatched(recipe: Recipe, tensors: Iterable[str], modules: Mapping[str, TensorEntry]) -> None:
    names = [*modules, *(name.removesuffix(".weight") for name in tensors)]
    for field, patterns in (("ignore", recipe.ignore), ("include", recipe.include), ("overrides", recipe.overrides)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in names):
                example = next(iter(modules), "none")
                raise RecipeError(f"{field} pattern {pattern!r} matches no module; a module is named like {example}")


def _with_presets(
    decisions: Mapping[str, Decision], shapes: Mapping[str, tuple[int, int]], recipe: Recipe
) -> dict[str, Decision]:
    """The decisions of quantized modules with preset and group size; refuses shapes that a format cannot hold."""
    presets = {module: recipe.preset_of(module) for module in shapes}
    sizes = {}
    for preset in dict.fromkeys(presets.values()):
        of_preset = {module: shape for module, shape in shapes.items() if presets[module] == preset}
        sizes[preset] = fitting_group_size(of_preset, recipe, preset)
    return {
        module: replace(decisions[module], preset=preset, group_size=sizes[preset])
        for module, preset in presets.items()
    }


def fitting_group_size(shapes: Mapping[str, tuple[int, int]], recipe: Recipe, preset: str) -> int:
    """Group size of int4 for these weights (out, in), one for all; 0 for formats that have no choice.

    Raises:
        RecipeError: a weight has no whole groups, or an odd number of rows where rows are stored in pairs.
    """
    weights = recipe.scheme_of(preset).weights
    chosen = weights.format == "int4"
    sizes = GROUP_SIZES if chosen and recipe.group_size == "auto" else (weights.group_size,)
    if weights.granularity != "group":
        return 0
    for size in sizes:
        misfits = [module for module, (_, columns) in shapes.items() if columns % size]
        if not misfits:
            break
    else:
        module = misfits[0]
        fits = [str(size) for size in GROUP_SIZES if not any(columns % size for _, columns in shapes.values())]
        instead = f"group_size: {' or '.join(fits)} (auto takes the largest), or " if chosen and fits else ""
        raise RecipeError(
            f"{module} has {shapes[module][1]} input features, which are no whole groups of {sizes[-1]} "
            f"({len(misfits)} such layers); choose {instead}ignore these layers, or a preset without groups like fp8"
        )
    odd = [module for module, (rows, _) in shapes.items() if rows % 2]
    if chosen and recipe.dialect == "modelopt" and odd:
        raise RecipeError(
            f"{odd[0]} has {shapes[odd[0]][0]} output features, but the modelopt dialect stores int4 rows in pairs; "
            "ignore this layer or use the compressed-tensors dialect"
        )
    return size if chosen else 0


def _refuse_split(quantized: Iterable[str], decisions: Mapping[str, Decision]) -> None:
    """Members of one runtime matrix must share their fate and their preset, and so must all experts of a layer."""
    groups: list[tuple[str, ...]] = fused_siblings(decisions)
    by_block: dict[str, list[str]] = defaultdict(list)
    for module in decisions:
        if expert := expert_of(module):
            by_block[expert.block].append(module)
    chosen = set(quantized)
    for group in [*groups, *map(tuple, by_block.values())]:
        kept = [module for module in group if module not in chosen]
        shown = f"{', '.join(group[:4])}{' ...' if group[4:] else ''}"
        if kept and len(kept) < len(group):
            one = next(module for module in group if module in chosen)
            raise RecipeError(
                f"{kept[0]} is kept ({decisions[kept[0]].reason}) but {one} is quantized; engines load "
                f"these as one matrix: ignore or quantize all of {shown}"
            )
        by_preset = {decisions[module].preset: module for module in group}
        if len(by_preset) > 1:
            said = " but ".join(f"{module} is {preset}" for preset, module in by_preset.items())
            raise RecipeError(f"{said}; engines load these as one matrix: give one preset to all of {shown}")


def _refuse_fused_experts(tensors: Mapping[str, TensorEntry], recipe: Recipe, blocks: Mapping[str, int]) -> None:
    fused = [
        entry.name
        for entry in tensors.values()
        if len(entry.shape) == 3
        and ".experts." in entry.name
        and (found := _NUMBERED.match(entry.name))
        and found["prefix"] in blocks
        and not any(matches(pattern, entry.name.removesuffix(".weight")) for pattern in recipe.ignore)
    ]
    if fused:
        raise SourceError(
            f"{fused[0]} (and {len(fused) - 1} more) stores all experts in one 3-D tensor, which this version "
            "cannot quantize; add '*.experts.*' to the recipe's ignore list to leave the experts as they are"
        )


def _refuse_dtype(quantized: Iterable[str], modules: Mapping[str, TensorEntry]) -> None:
    for module in quantized:
        entry = modules[module]
        if entry.dtype not in FLOAT_DTYPES:
            raise SourceError(
                f"{entry.name} is stored as {entry.dtype}; only {', '.join(FLOAT_DTYPES)} can be quantized"
            )
