"""Layouts: which flat rows and columns of a tensor every rank holds, by its placements on a device mesh.

Flat rows of a tensor are shape[:-1] flattened, of width shape[-1]; a vector has rows of width 1, a 0-dim tensor has
one row of width 1. All answers but `layout_of` are pure functions of small frozen values and are remembered, since a
large model asks them for 100,000 tensors of a few layouts. They repeat the rules of DTensor exactly: placements
apply from left to right, each cuts what is left of its dimension as torch.chunk does. Never reads a tensor's data.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from distribute.errors import UserError

SMALL = 32 << 10  # elements of a tensor that is not worth cutting: 64 KiB of bf16
CACHED = 1 << 17  # answers kept: tens of layouts, a thousand ranks

Ranges = tuple[range, ...]  # ascending, disjoint, none empty


@dataclass(frozen=True)
class Mesh:
    """A device mesh: global ranks in row-major order. The hash is kept: a mesh of 1,000 ranks is looked up often."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.ranks, self.shape)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Run:
    """Flat rows [start, stop) of the whole tensor are rows `at`.. of the rank's local part."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a whole tensor and a placement for each axis of its mesh, applied from left to right.

    A placement is ("R",) or ("S", dim, split factor); () altogether is a plain tensor, which each rank holds whole.
    """

    shape: tuple[int, ...]
    placements: tuple[tuple, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds: of these flat rows, in the order of its local part, these columns. Both empty: nothing."""

    rows: tuple[Run, ...]
    columns: Ranges


def rows_and_width(shape: Sequence[int]) -> tuple[int, int]:
    """Number of flat rows of a tensor, and elements of each."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


def layout_of(name: str, tensor: torch.Tensor) -> tuple[Layout, Mesh | None, torch.Tensor]:
    """The layout of a state tensor, the mesh (None: a plain tensor) and this rank's part of the data, not copied.

    The axes of the mesh come in the order in which they cut the tensor, so that left to right is always right.

    Raises:
        UserError: the tensor is Partial, sparse, on meta, of an unknown kind or placement, its local part
            does not have the shape that its placements say, or ranks of its mesh do not ascend. Names it.
    """
    if not isinstance(tensor, DTensor):
        _check_local(name, tensor)
        return Layout(tuple(tensor.shape)), None, tensor
    local = tensor._local_tensor.detach()  # not to_local(): it would wait for autograd and trace
    _check_local(name, local)
    placements = [_plain_placement(name, placement, tensor.dim()) for placement in tensor.placements]
    axes, placements = _in_order(tensor, placements)
    ranks = tensor.device_mesh.mesh.permute(axes)
    _check_order(name, ranks, placements)
    mesh = Mesh(tuple(ranks.flatten().tolist()), tuple(ranks.shape))
    layout = Layout(tuple(tensor.shape), tuple(placements))
    held = indices(layout, mesh, dist.get_rank())
    shape: tuple[int, ...] = tuple(sum(map(len, ranges)) for ranges in held) if held is not None else (0,)
    if tuple(local.shape) != shape and (0 not in shape or local.numel()):
        raise UserError(
            f"{name}: this rank holds {list(local.shape)} of {list(tensor.shape)}, but its placements "
            f"{tensor.placements} on a mesh {list(tensor.device_mesh.shape)} give it {list(shape)}; "
            "shard as torch.distributed.tensor.distribute_tensor does"
        )
    return layout, mesh, local


@lru_cache(CACHED)
def indices(layout: Layout, mesh: Mesh | None, rank: int) -> tuple[Ranges, ...] | None:
    """By dimension, the indices that a rank holds: its part is their product. None: the rank is not in the mesh."""
    held: list[Ranges] = [(range(size),) for size in layout.shape]
    if mesh is not None:
        if rank not in mesh.ranks:
            return None
        stride, position = len(mesh.ranks), mesh.ranks.index(rank)
        for placement, count in zip(layout.placements, mesh.shape, strict=True):
            stride //= count
            if placement[0] == "S":
                _, dim, factor = placement
                held[dim] = _shard(held[dim], factor, count, position // stride % count)
    return tuple(map(_merge, held))


@lru_cache(CACHED)
def part_of(layout: Layout, mesh: Mesh | None, rank: int) -> Part:
    """The rows and columns that a rank holds."""
    held = indices(layout, mesh, rank)
    if held is None or not all(held):
        return Part((), ())
    leading, columns = (held[:-1], held[-1]) if len(held) > 1 else (held, (range(1),))
    runs: list[Run] = []
    at = 0
    for rows in _flatten(leading, layout.shape):
        runs.append(Run(rows.start, rows.stop, at))
        at += len(rows)
    return Part(tuple(runs), columns)


def row_runs(layout: Layout, mesh: Mesh | None, rank: int) -> tuple[Run, ...] | None:
    """The flat rows that a rank holds whole, (): none; None: it holds parts of rows."""
    part = part_of(layout, mesh, rank)
    return part.rows if sum(map(len, part.columns)) in (0, rows_and_width(layout.shape)[1]) else None


@lru_cache(CACHED)
def lies_in_rows(layout: Layout, meshes: tuple[Mesh | None, ...]) -> bool:
    """Whether every rank holds whole rows, or nothing. `meshes` is by rank."""
    return all(row_runs(layout, mesh, rank) is not None for rank, mesh in enumerate(meshes))


@lru_cache(CACHED)
def replicas(layout: Layout, meshes: tuple[Mesh | None, ...]) -> dict[Part, tuple[int, ...]]:
    """The ranks that hold each part, in their order. `meshes` is by rank. Not to be changed: it is remembered."""
    found: dict[Part, list[int]] = {}
    for rank, mesh in enumerate(meshes):
        part = part_of(layout, mesh, rank)
        if part.rows:
            found.setdefault(part, []).append(rank)
    return {part: tuple(ranks) for part, ranks in found.items()}


@lru_cache(CACHED)
def overlaps(layout: Layout, meshes: tuple[Mesh | None, ...]) -> bool:
    """Whether ranks hold parts that share elements and yet are not the same: no digest can compare these."""
    held = sum(
        sum(run.stop - run.start for run in part.rows) * sum(map(len, part.columns))
        for part in replicas(layout, meshes)
    )
    return held > prod(layout.shape)


def owned_rows(layout: Layout, meshes: tuple[Mesh | None, ...], turn: int) -> tuple[Ranges, ...]:
    """By rank, the flat rows that it writes: a partition of all rows (an empty tensor has none).

    A rank owns only rows that it holds, or holds some columns of. Ranks that hold parts of the same rows share these
    evenly; those of a small tensor, or a single row, go to one of them by `turn`, the number of the tensor.
    """
    rows, width = rows_and_width(layout.shape)
    if rows > 1 and rows * width > SMALL:
        return _shares(layout, meshes)
    owned: list[Ranges] = [()] * len(meshes)
    for ranges, ranks in _sharers(layout, meshes):
        owned[ranks[turn % len(ranks)]] = ranges
    return tuple(owned)


@lru_cache(CACHED)
def _shares(layout: Layout, meshes: tuple[Mesh | None, ...]) -> tuple[Ranges, ...]:
    owned: list[Ranges] = [()] * len(meshes)
    for ranges, ranks in _sharers(layout, meshes):
        total = sum(map(len, ranges))
        for place, rank in enumerate(ranks):
            owned[rank] = _cut(ranges, total * place // len(ranks), total * (place + 1) // len(ranks))
    return tuple(owned)


@lru_cache(CACHED)
def _sharers(layout: Layout, meshes: tuple[Mesh | None, ...]) -> tuple[tuple[Ranges, tuple[int, ...]], ...]:
    """A partition of all rows, each piece with the ranks that hold it or some of its columns."""
    found: dict[Ranges, list[int]] = {}
    for part, ranks in replicas(layout, meshes).items():
        found.setdefault(tuple(range(run.start, run.stop) for run in part.rows), []).extend(ranks)
    rows, width = rows_and_width(layout.shape)
    if sum(len(held) for ranges in found for held in ranges) != rows:  # meshes of unlike shapes: parts overlap
        overlapping, found = found, {}
        taken: Ranges = ()
        for ranges, holders in overlapping.items():
            if left := _without(ranges, taken):
                found[left] = holders
                taken = _merge(sorted((*taken, *left), key=lambda held: held.start))
        assert not width or sum(map(len, taken)) == rows, "rows that no rank holds"
    return tuple((ranges, tuple(sorted(ranks))) for ranges, ranks in found.items())


def _check_local(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise UserError(f"{name} is on the meta device and has no data; load or initialise the model first")
    if tensor.layout != torch.strided:
        raise UserError(f"{name} has layout {tensor.layout}; only dense tensors can be exported: call to_dense()")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UserError(f"{name} is a {type(tensor).__name__}; plain tensors and DTensors can be exported")


def _check_order(name: str, ranks: torch.Tensor, placements: Sequence[tuple]) -> None:
    """Process groups sort their ranks: where those of a mesh do not ascend, DTensor's methods differ on the order."""
    for axis, placement in enumerate(placements):
        if placement[0] == "S" and bool((ranks.diff(dim=axis) < 0).any()):
            raise UserError(
                f"{name} is cut along a mesh whose ranks do not ascend ({ranks.flatten().tolist()}), so the order of "
                "its shards is not certain; make the mesh of ascending ranks"
            )


def _plain_placement(name: str, placement: Placement, dims: int) -> tuple:
    if type(placement) is Replicate:
        return ("R",)
    if isinstance(placement, Shard | _StridedShard) and type(placement) in (Shard, _StridedShard):
        return ("S", placement.dim % dims, int(getattr(placement, "split_factor", 1)))
    if isinstance(placement, Partial):
        raise UserError(f"{name} is {placement!r}: its sum over ranks is not computed yet; redistribute it first")
    raise UserError(
        f"{name} has placement {placement!r}, which is not known; redistribute it to Shard or Replicate first"
    )


def _in_order(tensor: DTensor, placements: list[tuple]) -> tuple[list[int], list[tuple]]:
    """Axes of the mesh in the order in which they cut the tensor, and their placements.

    FSDP over tensor parallelism cuts from right to left. DTensor says so by a shard order, or by _StridedShard, whose
    split factor is the number of shards that there are already: the order is read off the factors as DTensorSpec
    does, and then says all. Factors that no order gives are applied as they are.
    """
    axes = list(range(len(placements)))
    strided = any(placement[0] == "S" and placement[2] > 1 for placement in placements)
    if getattr(tensor._spec, "use_strided_shard_as_shard_order", strided):
        order = _order_of_factors(placements, tensor.device_mesh.shape)
        if order is None:
            return axes, placements
        placements = [("S", placement[1], 1) if placement[0] == "S" else placement for placement in placements]
    else:
        order = [list(entry.mesh_dims) for entry in getattr(tensor._spec, "shard_order", None) or ()]
    if any(cutting != sorted(cutting) for cutting in order):
        cutting = [axis for group in order for axis in group]
        axes = [axis for axis in axes if axis not in cutting] + cutting
    return axes, [placements[axis] for axis in axes]


def _order_of_factors(placements: Sequence[tuple], shape: Sequence[int]) -> list[list[int]] | None:
    """For each dimension that is cut, the axes in order; None: no order has these split factors."""
    order: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        if placements[axis][0] == "S":
            _, dim, factor = placements[axis]
            group = order.setdefault(dim, [])
            shards = list(accumulate((shape[other] for other in group), mul, initial=1))
            if factor not in shards:
                return None
            group.insert(shards.index(factor), axis)
    return list(order.values())


def _shard(held: Ranges, factor: int, count: int, place: int) -> Ranges:
    """Shard number `place` of `count`: torch.chunk's, of each of `factor` chunks."""
    size = sum(map(len, held))
    pieces = [_chunk(range(size), factor, number) for number in range(factor)]
    return tuple(part for piece in pieces for part in _cut(held, *_bounds(_chunk(piece, count, place))))


def _chunk(span: range, count: int, number: int) -> range:
    size = -(-len(span) // count)
    return span[number * size : (number + 1) * size]


def _bounds(span: range) -> tuple[int, int]:
    return span.start, span.stop


def _cut(ranges: Iterable[range], start: int, stop: int) -> Ranges:
    """Elements number start..stop of some ranges."""
    found = []
    for held in ranges:
        piece = held[max(start, 0) : max(stop, 0)]
        if piece:
            found.append(piece)
        start, stop = start - len(held), stop - len(held)
    return tuple(found)


def _merge(ranges: Iterable[range]) -> Ranges:
    """The same elements with neighbours joined."""
    merged: list[range] = []
    for held in ranges:
        if merged and merged[-1].stop == held.start:
            merged[-1] = range(merged[-1].start, held.stop)
        elif held:
            merged.append(held)
    return tuple(merged)


def _flatten(held: Sequence[Ranges], shape: Sequence[int]) -> Ranges:
    """Flat row numbers of a product of indices of the leading dimensions, in row-major order."""
    rows: Ranges = (range(1),)
    for ranges, size in zip(held, shape, strict=False):
        if ranges == (range(size),):
            rows = tuple(range(span.start * size, span.stop * size) for span in rows)
        else:
            starts = (index * size for span in rows for index in span)
            rows = tuple(range(start + span.start, start + span.stop) for start in starts for span in ranges)
    return _merge(rows)


def _without(ranges: Ranges, taken: Ranges) -> Ranges:
    left = []
    for held in ranges:
        start = held.start
        for other in taken:
            if other.start < held.stop and start < other.stop:
                left.append(range(start, other.start))
                start = other.stop
        left.append(range(start, held.stop))
    return tuple(span for span in left if span)
