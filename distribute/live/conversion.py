"""A model's own conversion mapping (transformers), undone on row numbers instead of weights.

Owns the way from the tensors in memory to those on the Hub: the mapping is run on stand-ins that hold row numbers,
so the answer says which rows every tensor on the Hub is made of. This file alone touches the saving side of that
mapping. Sees shapes only: sharded, offloaded and changed models give the same answer as the model that was loaded.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
)

from distribute.errors import UserError

Shape = tuple[int, ...]
#: Columns of a stand-in: enough to see whether an operation moves, splits or joins columns.
PROBE_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Flat rows [start, stop) of a tensor in memory."""

    source: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor as it is named on the Hub; `parts` are its flat rows, in order."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors in memory that it is made of, each once."""
        return tuple(dict.fromkeys(part.source for part in self.parts))


@dataclass
class _Group:
    """Tensors in memory that one conversion takes together, with the pattern that each of them matched."""

    converter: WeightConverter
    patterns: dict[str, str] = field(default_factory=dict)


class Conversion:
    """Undoes the mapping with which `model` was, or would be, loaded. Not thread-safe; one object for one pass."""

    def __init__(self, model: nn.Module):
        try:
            transforms = [transform.reverse_transform() for transform in reversed(_transforms(model))]
        except ValueError as error:
            raise UserError(
                f"the weights of {type(model).__name__} were converted on loading in a way that transformers cannot "
                f"undo ({error}); load the model without a quantization config, or already dequantized"
            ) from error
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self._config = getattr(model, "config", None)

    def rename(self, name: str) -> str:
        """The name on the Hub of a tensor that is stored as it is."""
        return apply_renamings(name, self._renamings)

    def converts(self, name: str) -> bool:
        """Whether a tensor of this name is split, merged or reordered, not only renamed."""
        return apply_converters(name, self._converters)[1] is not None

    def revert(self, shapes: Mapping[str, Shape]) -> list[HubTensor]:
        """What `save_pretrained` makes of tensors of these names and global shapes.

        Raises:
            UserError: a tensor on the Hub is not made of whole rows, or the mapping cannot be undone.
        """
        tensors, groups = [], dict[str, _Group]()
        by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        # The library's order: it decides how several sources are joined, and which paired renamings are active.
        for name in sorted(shapes, key=dot_natural_key):
            target, pattern = apply_converters(name, self._converters)
            if pattern is None:
                tensors.append(whole(self.rename(name), name, shapes[name]))
                continue
            if target not in groups:
                groups[target] = _Group(deepcopy(by_pattern[pattern]))
            groups[target].patterns[name] = pattern
        for target, group in groups.items():
            tensors += self._convert(target, group, shapes)
        return tensors

    def _convert(self, target: str, group: _Group, shapes: Mapping[str, Shape]) -> Iterator[HubTensor]:
        starts, after = {}, 0
        for name, pattern in group.patterns.items():
            starts[name] = after
            # One number is left out between two sources, so that a run of numbers never spans both.
            after += flat_rows(shapes[name]) + 1
            group.converter.add_tensor(target, name, pattern, partial(_probe, shapes[name], starts[name]))  # type: ignore[arg-type]
        assert after * PROBE_WIDTH < 2**31, f"too many rows for int32: {target}"
        # Some operations compare with the parameter's shape: they shall see that of the stand-in.
        owner = SimpleNamespace(get_parameter=lambda name: torch.empty(_narrow(shapes[name]), device="meta"))
        try:
            made = group.converter.convert(target, model=owner, config=self._config)
        except Exception as error:  # whatever the operations of a mapping may raise
            names = ", ".join(group.patterns)
            raise UserError(f"transformers cannot convert {names} back to what the Hub has: {error}") from error
        kept = 0
        for name, tensor in made.items():
            ids = tensor[0] if isinstance(tensor, list) else tensor
            hub = _read(self.rename(name), ids, starts, shapes)
            kept += sum(part.stop - part.start for part in hub.parts)
            yield hub
        if kept != after - len(starts):
            raise UserError(
                f"of {after - len(starts)} rows of {', '.join(group.patterns)}, transformers puts {kept} on the Hub; "
                "the number of parts on the Hub does not fit the tensor's shape"
            )


def whole(name: str, source: str, shape: Shape) -> HubTensor:
    """`source` under another name."""
    return HubTensor(name, shape, (Part(source, 0, flat_rows(shape)),))


def flat_rows(shape: Shape) -> int:
    """Rows of a tensor: shape[:-1] flattened; every element of a 1-D tensor is a row, a 0-dim tensor is one."""
    return shape[0] if len(shape) == 1 else prod(shape[:-1])


def row_width(shape: Shape) -> int:
    """Elements in a flat row."""
    return shape[-1] if len(shape) > 1 else 1


def _transforms(model: nn.Module) -> list[WeightTransform]:
    """What `save_pretrained` undoes: the transforms that loading used, else those registered for the class."""
    used: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if used is not None:
        return used
    if not isinstance(model, PreTrainedModel):
        return []
    registered = get_model_conversion_mapping(_with_own_classes(model), add_legacy=False)  # type: ignore[arg-type]
    # Of a model that was not loaded, nobody knows whether its checkpoint has the prefix; the library adds none.
    return [entry for entry in registered if not isinstance(entry, PrefixChange)]


def _with_own_classes(module: nn.Module) -> nn.Module:
    """A twin of the module tree that shares all tensors, in which FSDP2 has not replaced the models' classes.

    The library finds a mapping by the class's name and the place where it is defined.
    """
    own = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    twin: nn.Module = object.__new__(own)  # type: ignore[assignment]
    children = {name: child and _with_own_classes(child) for name, child in module._modules.items()}
    twin.__dict__.update(module.__dict__, _modules=children)
    return twin


def _probe(shape: Shape, start: int) -> Tensor:
    """A narrow stand-in: row r holds (start + r) * PROBE_WIDTH + column."""
    width = min(row_width(shape), PROBE_WIDTH)
    rows = torch.arange(start, start + flat_rows(shape), dtype=torch.int32)
    return (rows.unsqueeze(1) * PROBE_WIDTH + torch.arange(width, dtype=torch.int32)).reshape(_narrow(shape))


def _narrow(shape: Shape) -> Shape:
    return (*shape[:-1], min(shape[-1], PROBE_WIDTH)) if len(shape) > 1 else shape


def _read(name: str, ids: Tensor, starts: Mapping[str, int], shapes: Mapping[str, Shape]) -> HubTensor:
    """The tensor of which the stand-in came out as `ids`; `starts` has the number of every source's first row."""
    order, firsts = list(starts), list(starts.values())

    def source_of(row: int) -> str:
        return order[bisect_right(firsts, row) - 1]

    width = row_width(shapes[source_of(int(ids.flatten()[0]) // PROBE_WIDTH) if ids.numel() else order[0]])
    columns = min(width, PROBE_WIDTH)
    if columns > 1 and ids.shape[-1:] != (columns,):
        raise _not_rows(name, order)
    table = ids.reshape(-1, columns)
    rows = table[:, 0] // PROBE_WIDTH
    if not torch.equal(table, rows.unsqueeze(1) * PROBE_WIDTH + torch.arange(columns, dtype=torch.int32)):
        raise _not_rows(name, order)
    parts = []
    for first, last in _runs(rows):
        source = source_of(first)
        if row_width(shapes[source]) != width:
            raise _not_rows(name, order)
        parts.append(Part(source, first - starts[source], last + 1 - starts[source]))
    shape = (*ids.shape[:-1], width) if columns > 1 else tuple(ids.shape)
    return HubTensor(name, shape, tuple(parts))


def _runs(rows: Tensor) -> Iterator[tuple[int, int]]:
    """First and last of every stretch of consecutive numbers."""
    if not rows.numel():
        return iter(())
    ends = (rows.diff() != 1).nonzero().flatten()
    firsts = torch.cat([rows[:1], rows[ends + 1]])
    lasts = torch.cat([rows[ends], rows[-1:]])
    return zip(firsts.tolist(), lasts.tolist(), strict=True)


def _not_rows(name: str, sources: Iterable[str]) -> UserError:
    return UserError(
        f"{name}, as the Hub has it, is not made of whole rows of {', '.join(sources)}: it is transposed, or split "
        "or joined along the columns; a live export only writes whole rows, so save this model with "
        "model.save_pretrained, or quantize the checkpoint with a pipeline that reads it from its files"
    )
