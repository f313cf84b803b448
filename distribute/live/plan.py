"""The plan of a live export: which flat rows of the model's state become which bytes of which file. Pure.

A function of names, shapes, formats and scales, which are the same on all ranks, so every rank makes the same plan
and nothing of it travels but a digest. What a rank does of it is decided by the rows it holds.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distribute.errors import UserError
from distribute.live.encode import FORMATS
from distribute.live.names import HubTensor
from distribute.live.quantizers import Quantized
from distribute.shards import ShardFile, Spec, plan_files
from distribute.source import TensorEntry
from distribute.tensors import NAMES, to_bytes

RESERVED = "__metadata__"  # safetensors README


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the rows of one weight are coded. `written`: suffix -> output that gets rows, the codes among them."""

    format: str
    group_size: int
    scales: Mapping[str, Tensor]
    written: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class Target:
    """Flat rows [start, stop) of a state tensor that become rows `row`... of `output`."""

    start: int
    stop: int
    output: TensorEntry
    row: int
    encoding: Encoding | None = None


@dataclass(frozen=True)
class LivePlan:
    """`targets`: by state tensor, in the order of rows. `values`: outputs that every rank knows, by name."""

    files: list[ShardFile]
    outputs: list[TensorEntry]
    targets: dict[str, list[Target]]
    values: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for file in self.files)

    def facts(self) -> dict[str, list[Any]]:
        """By output, all that decides its bytes beside the model's state; JSON. Scales are outputs as well."""
        facts: dict[str, list[Any]] = {output.name: [output.dtype, list(output.shape)] for output in self.outputs}
        for name, value in self.values.items():
            facts[name].append(hashlib.sha256(to_bytes(value)).hexdigest())
        for source, targets in self.targets.items():
            for target in targets:
                form = target.encoding and [target.encoding.format, target.encoding.group_size]
                facts[target.output.name].append([source, target.start, target.stop, target.row, form])
        return facts


@dataclass
class _Parts:
    """What is collected before anything has a place."""

    specs: list[Spec] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    # by output: (source, first row, last row, the row of the output that the first becomes)
    moves: dict[str, list[tuple[str, int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    # by output: the weight, its scales, and the suffixes of what is written row by row
    encodings: dict[str, tuple[Quantized, dict[str, Tensor], tuple[str, ...]]] = field(default_factory=dict)


def make_live_plan(
    hub_tensors: Iterable[HubTensor],
    dtypes: Mapping[str, torch.dtype],
    values: Mapping[str, Tensor],
    quantized: Mapping[str, Quantized],
    *,
    model_dtype: torch.dtype,
    max_shard_bytes: int,
) -> LivePlan:
    """Plan the files.

    Args:
        hub_tensors: what each tensor of the checkpoint is made of.
        dtypes: of the state tensors, by name.
        values: tensors that every rank knows (K/V scales), by the name that `hub_tensors` uses as their source.
        quantized: weights to encode, by state name; every absmax is known.
        model_dtype: weights are rounded to it before they are coded.

    Raises:
        UserError: a weight cannot be coded as asked, there is no tensor, or names cannot be stored.
    """
    parts = _Parts()
    for tensor in hub_tensors:
        source = tensor.parts[0].source
        if source in values:
            parts.specs.append((tensor.name, NAMES[values[source].dtype], tensor.shape))
            parts.values[tensor.name] = values[source].reshape(tensor.shape)
        elif source in quantized:
            _add_quantized(parts, tensor, quantized[source], model_dtype)
        else:
            _add_copy(parts, tensor, dtypes)
    _refuse_names(parts.specs)
    files, outputs = plan_files(parts.specs, max_shard_bytes)
    return LivePlan(files, outputs, _place(parts, {output.name: output for output in outputs}), parts.values)


def _add_copy(parts: _Parts, tensor: HubTensor, dtypes: Mapping[str, torch.dtype]) -> None:
    kinds = {dtypes[part.source] for part in tensor.parts}
    if len(kinds) > 1:
        raise UserError(f"{tensor.name} is made of tensors of several dtypes: {', '.join(map(str, kinds))}")
    parts.specs.append((tensor.name, NAMES[kinds.pop()], tensor.shape))
    row = 0
    for part in tensor.parts:
        parts.moves[tensor.name].append((part.source, part.start, part.stop, row))
        row += part.stop - part.start


def _add_quantized(parts: _Parts, tensor: HubTensor, weight: Quantized, dtype: torch.dtype) -> None:
    """The codes of a weight and its scales."""
    if len(tensor.parts) != 1 or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
        raise UserError(
            f"{weight.weight} is quantized, but {tensor.name} of shape {list(tensor.shape)} in the checkpoint is not "
            "one 2-D weight made of it; leave it unquantized"
        )
    (part,), (rows, width) = tensor.parts, tensor.shape
    form, module = FORMATS[weight.format], tensor.name.removesuffix(".weight")
    if form.in_groups and width % weight.group_size:
        raise UserError(
            f"{weight.weight} has {width} inputs, which groups of {weight.group_size} do not divide; "
            "leave it unquantized or use another format"
        )
    scales = form.scales(weight.absmax_of_rows(part.start, part.stop), dtype)
    values = dict(scales)
    if form.input_scale is not None and weight.input_amax is not None:
        values["input_scale"] = form.input_scale(weight.input_amax, dtype)
    for suffix, value in values.items():
        parts.values[f"{module}.{suffix}"] = value
        parts.specs.append((f"{module}.{suffix}", NAMES[value.dtype], tuple(value.shape)))
    by_row = form.tensors(width, weight.group_size)
    parts.specs += [(f"{module}.{suffix}", kind, (rows, elements)) for suffix, (kind, elements) in by_row.items()]
    parts.moves[tensor.name] = [(part.source, part.start, part.stop, 0)]
    parts.encodings[tensor.name] = (weight, scales, tuple(by_row))


def _place(parts: _Parts, outputs: Mapping[str, TensorEntry]) -> dict[str, list[Target]]:
    targets: dict[str, list[Target]] = defaultdict(list)
    for name, moves in parts.moves.items():
        encoding = None
        if name in parts.encodings:
            weight, scales, suffixes = parts.encodings[name]
            module = name.removesuffix(".weight")
            written = {suffix: outputs[f"{module}.{suffix}"] for suffix in suffixes}
            encoding = Encoding(weight.format, weight.group_size, scales, written)
        for source, start, stop, row in moves:
            targets[source].append(Target(start, stop, outputs[name], row, encoding))
    for found in targets.values():
        found.sort(key=lambda target: target.start)
    return dict(targets)


def _refuse_names(specs: Sequence[Spec]) -> None:
    seen: set[str] = set()
    if not specs:
        raise UserError("the model has no tensors, so there is nothing to write; export the model that holds them")
    for name, *_ in specs:
        if name == RESERVED:
            raise UserError(f"{name} means something else in a safetensors file; rename it")
        if name in seen:
            raise UserError(f"two tensors of the model would be stored as {name}; rename one of them")
        seen.add(name)
