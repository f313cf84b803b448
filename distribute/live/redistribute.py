"""Redistribution: tensors that are cut across their rows become whole rows of their owners, block by block.

The only place where weights travel between ranks. A part goes straight from one rank that holds it to the owner of
the rows; what an owner holds itself is not sent. All that is sent follows from layouts, which every rank knows, so no
message is announced. Bits move, not values. A rank holds one block of rows, and about as much to send and to receive.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from distribute.control import Control
from distribute.live.layout import Layout, Mesh, Part, Ranges, Run, part_of, replicas, row_runs, rows_and_width

BLOCK_BYTES = 64 << 20
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Common = list[tuple[int, int, int]]  # (row of the local part, row of the block, number of rows)


def full_rows(
    local: Tensor,
    layout: Layout,
    meshes: tuple[Mesh | None, ...],
    control: Control,
    owned: Sequence[Ranges],
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[tuple[range, Tensor]]:
    """(flat rows, CPU tensor [rows, width]) of all rows that this rank owns, in their order.

    Called by all ranks, which are the members of `control`, in lockstep: each iterates to the end, also where it owns
    nothing. Nothing is sent, and no rank waits, for a tensor that lies in whole rows.

    Args:
        local: this rank's part, on any device and of any strides, of a dtype of 1, 2, 4 or 8 bytes.
        meshes: by rank.
        owned: by rank, as `owned_rows` gives them.
        block_bytes: of whole rows that a rank completes at a time; a row is not cut.

    Raises:
        NogatherError: a rank failed or ended. The same error on all ranks.
    """
    rank, width = control.rank, rows_and_width(layout.shape)[1]
    routes, own = _routes(layout, meshes), part_of(layout, meshes[rank], rank)
    source = local.detach().view(BITS[local.element_size()])
    step = max(1, block_bytes // max(1, width * local.element_size()))
    blocks = [_blocks(ranges, step) for ranges in owned]
    for number in range(max(map(len, blocks), default=0)):
        wanted = [mine[number] if number < len(mine) else () for mine in blocks]
        block = torch.empty((sum(map(len, wanted[rank])), width), dtype=source.dtype, device="cpu")
        for at, row, count in _common(own.rows, wanted[rank]):
            _put(block[row : row + count], own.columns, local_rows(source, at, at + count))
        if any(routes):
            _exchange(block, source, own, control, routes, wanted)
        done = 0
        for rows in wanted[rank]:
            yield rows, block[done : done + len(rows)].view(local.dtype)
            done += len(rows)


def local_rows(local: Tensor, start: int, stop: int) -> Tensor:
    """Flat rows of a tensor as [rows, width]: a view where the strides allow one, else a copy of these rows alone."""
    if local.dim() < 2 or local.is_contiguous():
        return local.reshape(rows_and_width(local.shape))[start:stop]
    if local.dim() == 2:
        return local[start:stop]
    return local[torch.unravel_index(torch.arange(start, stop, device=local.device), local.shape[:-1])]


@lru_cache(1024)
def _routes(layout: Layout, meshes: tuple[Mesh | None, ...]) -> tuple[dict[int, Part], ...]:
    """By owner, the ranks that send to it and the parts they hold; none to an owner that holds whole rows.

    Owners that hold the same part take each other part from different ones of its holders, in turn.
    """
    holders = replicas(layout, meshes)
    alike: dict[tuple[Run, ...], list[Part]] = {}  # parts of the same rows have all their columns: they fill a mesh
    for part in holders:
        alike.setdefault(part.rows, []).append(part)
    routes: list[dict[int, Part]] = [{} for _ in meshes]
    for own, owners in holders.items():
        others = [part for part in alike[own.rows] if part != own]
        for place, owner in enumerate(owners):
            if row_runs(layout, meshes[owner], owner) is None:
                routes[owner] = {holders[part][place % len(holders[part])]: part for part in others}
    return tuple(routes)


def _exchange(
    block: Tensor,
    source: Tensor,
    own: Part,
    control: Control,
    routes: Sequence[dict[int, Part]],
    wanted: Sequence[Ranges],
) -> None:
    """One round: send what others want of this rank's part, and complete the own block. Called by all ranks."""
    sends = {}
    for owner, sources in enumerate(routes):
        common = _common(own.rows, wanted[owner]) if control.rank in sources else []
        if common:
            sends[owner] = _pack(source, own, common)
    receives, places = {}, {}
    for sender, part in routes[control.rank].items():
        common = _common(part.rows, wanted[control.rank])
        if common:
            count = sum(count for _, _, count in common)
            receives[sender] = torch.empty((count, _width(part)), dtype=source.dtype, device="cpu")
            places[sender] = common
    control.transfer(
        "redistribute",
        {owner: _bytes(rows) for owner, rows in sends.items()},
        {sender: _bytes(rows) for sender, rows in receives.items()},
    )
    for sender, common in places.items():
        done = 0
        for _, row, count in common:
            rows = receives[sender][done : done + count]
            _put(block[row : row + count], routes[control.rank][sender].columns, rows)
            done += count


def _pack(source: Tensor, own: Part, common: Common) -> Tensor:
    """CPU tensor [rows, own columns] of the own rows that an owner wants."""
    packed = torch.empty((sum(count for _, _, count in common), _width(own)), dtype=source.dtype, device="cpu")
    done = 0
    for at, _, count in common:
        packed[done : done + count].copy_(local_rows(source, at, at + count))
        done += count
    return packed


def _put(rows: Tensor, columns: Ranges, part: Tensor) -> None:
    """Set columns of whole rows; `part` holds these columns side by side."""
    done = 0
    for held in columns:
        rows[:, held.start : held.stop].copy_(part[:, done : done + len(held)])
        done += len(held)


def _width(part: Part) -> int:
    return sum(map(len, part.columns))


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def _blocks(ranges: Ranges, step: int) -> list[Ranges]:
    """The same rows in blocks of `step`, each of them some ranges."""
    blocks: list[list[range]] = []
    room = 0
    for held in ranges:
        while held:
            if not room:
                blocks.append([])
                room = step
            blocks[-1].append(held[:room])
            held, room = held[room:], room - len(held[:room])
    return list(map(tuple, blocks))


def _common(runs: Sequence[Run], block: Ranges) -> Common:
    """Rows that are in both. Both ascend, so that one walk along them is enough."""
    found: Common = []
    first = at = 0
    for wanted in block:
        while first < len(runs) and runs[first].stop <= wanted.start:
            first += 1
        number = first
        while number < len(runs) and runs[number].start < wanted.stop:
            run = runs[number]
            start, stop = max(run.start, wanted.start), min(run.stop, wanted.stop)
            found.append((run.at + start - run.start, at + start - wanted.start, stop - start))
            number += 1
        at += len(wanted)
    return found
