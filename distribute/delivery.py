"""Delivery: a value of every rank to the first of them, whole, or the same error on all.

A large value is read from its rank's memory, others lie in a segment of shared memory, when both ranks share a host;
in a file when there is a workspace folder; and travel over the control group where none of these works. What is left
for the first rank has a name only until it has opened it, before this returns. Nothing is written before all ranks
have agreed on what is given.
"""

import json
import logging
import mmap
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from distribute import peer_memory
from distribute.control import Control
from distribute.errors import RankError, UserError, WorkspaceError
from distribute.nested import flatten, unflatten
from distribute.segments import (
    SHARED_MEMORY,
    collect_dead,
    collect_dead_once,
    host,
    map_segment,
    new_name,
    write_segment,
)
from distribute.state import copy_into, from_buffer, plan_layout, write_into
from distribute.state_file import VISIBLE_LIMIT_S, await_state, make_private_folder, write_state

log = logging.getLogger(__name__)

TREE = "tree"
CHUNK_BYTES = 64 << 20  # of one transfer: each is waited for on its own


def deliver(
    control: Control, name: str, value: Any, ranks: Sequence[int], workspace: Path | None, *, alike: bool = False
) -> list[Any]:
    """Every rank's value on the first of `ranks`, in their order; an empty list on the others. Called by all.

    Args:
        name: of the caller, for messages.
        alike: values must be tensors of one dtype and shape.

    Raises:
        UserError: values or arguments do not fit together, or cannot be sent.
        RankError: a rank failed or did not come.
    """
    try:
        with ExitStack() as names:
            return _Delivery(control, name, value, list(ranks), workspace, names).run(alike)
    except RankError:  # a rank that was killed could not take away what it had left
        for folder in (SHARED_MEMORY, Path(tempfile.gettempdir()), *([workspace] if workspace else [])):
            collect_dead(folder)
        raise


class _Delivery:
    def __init__(
        self, control: Control, name: str, value: Any, ranks: list[int], workspace: Path | None, names: ExitStack
    ):
        self.control, self.name, self.value, self.ranks = control, name, value, ranks
        self.workspace, self.names = workspace, names
        self.first = ranks[0]
        self.values = {self.first: value}  # on the first rank

    def run(self, alike: bool) -> list[Any]:
        notes = self.control.call(f"{self.name}: compare", partial(self._compare, alike))
        _refuse_unlike(self.name, self.ranks, notes)
        sizes = {rank: note["nbytes"] for rank, note in notes.items() if rank != self.first and note["nbytes"]}
        is_near = notes[self.control.rank]["host"] == notes[self.first]["host"]
        is_large = any(size >= peer_memory.LEAST_BYTES for size in sizes.values())
        if is_large and self.workspace is None and not any(note["refused"] for note in notes.values()):
            for rank in self._look(notes, sizes, is_near):
                del sizes[rank]
        places: dict[int, Any] = {}
        if sizes:
            places = self.control.call(
                f"{self.name}: write", partial(self._write, self.control.rank in sizes, is_near)
            )
        unseen = self.control.call(f"{self.name}: read", partial(self._read, notes, places, sizes))[self.first]
        if unseen:
            with self.control.together(f"{self.name}: transfer"):
                self._transfer({rank: sizes[rank] for rank in unseen})
        return [self.values[rank] for rank in self.ranks] if self.control.rank == self.first else []

    def _compare(self, alike: bool) -> dict[str, Any]:
        """A note that says what this rank gives. One without a tensor element is given at once, in the note."""
        kind = None
        if alike:
            if not isinstance(self.value, torch.Tensor):
                raise UserError(f"{self.name} was given a {type(self.value).__name__}; give a tensor")
            kind = f"{str(self.value.dtype).removeprefix('torch.')} {list(self.value.shape)}"
        tree, self.tensors = flatten(
            self.value
        )  # on the first rank too: what is refused must not depend on the world
        self.metadata = {TREE: json.dumps(tree)}
        self.layout = plan_layout(self.tensors, self.metadata)
        has_data = self.layout.has_data
        head = None if has_data or self.control.rank == self.first else self.layout.head.decode("latin-1")
        given = {"ranks": self.ranks, "nfs": self.workspace is not None, "kind": kind, "host": host()}
        given |= {"process": peer_memory.identify(), "refused": _Refused.by_kernel}
        return given | {"nbytes": self.layout.nbytes if has_data else 0, "head": head}

    def _look(self, notes: dict[int, Any], sizes: dict[int, int], is_near: bool) -> list[int]:
        """Let the first rank read large values from memory; returns whose it got. Called by all.

        No rank leaves before the reading is over, so what it reads stays where it is.
        """
        reader = notes[self.first]["process"]
        offer = None
        if is_near and self.control.rank in sizes and peer_memory.Offer.can_be(self.layout, self.tensors):
            offer = peer_memory.Offer(self.layout, self.tensors)
        try:
            offers = self.control.call(f"{self.name}: offer", partial(_make_offer, offer, reader))
            step = f"{self.name}: look"
            got = self.control.call(step, partial(self._read_memory, notes, offers, sizes))[self.first]
        finally:
            if offer is not None:
                peer_memory.allow(0)
        if got["refused"]:
            _Refused.by_kernel = True
        return got["ranks"]

    def _read_memory(self, notes: dict[int, Any], offers: dict[int, Any], sizes: dict[int, int]) -> dict[str, Any]:
        found: list[int] = []
        for rank, ranges in offers.items() if self.control.rank == self.first else ():
            process = notes[rank]["process"]
            if not ranges or not peer_memory.is_neighbour(process):
                continue
            try:
                buffer = peer_memory.read(process["pid"], ranges, sizes[rank])
            except OSError as error:
                log.info("memory of rank %d cannot be read (%s); shared memory is used instead", rank, error)
                return {"ranks": found, "refused": True}
            self._unpack(rank, *from_buffer(buffer))
            found.append(rank)
        return {"ranks": found, "refused": False}

    def _write(self, has_data: bool, is_near: bool) -> dict[str, Any] | None:
        """Leave the value where the first rank finds it; None where there is no such place."""
        if not has_data:
            return None
        if self.workspace is not None:
            make_private_folder(self.workspace)
            collect_dead_once(self.workspace)
            path = self.workspace / new_name()
            self.names.callback(_unlink, path)
            return {"path": path.name, "checksum": write_state(path, self.tensors, self.metadata)}
        if not is_near:
            return None
        try:
            path = write_segment(self.layout.nbytes, partial(write_into, layout=self.layout, tensors=self.tensors))
        except WorkspaceError as error:
            _warn_once(f"{error}; until then tensors travel over the network")
            return None
        self.names.callback(_unlink, path)
        return {"path": str(path)}

    def _read(self, notes: dict[int, Any], places: dict[int, Any], sizes: dict[int, int]) -> list[int]:
        """Open what the others left, and say whose is still missing."""
        unseen = []
        for rank in self.ranks[1:] if self.control.rank == self.first else ():
            if rank in self.values:
                continue  # read from its memory
            if rank not in sizes:
                self._unpack(rank, *from_buffer(bytearray(notes[rank]["head"].encode("latin-1"))))
            elif self.workspace is not None:
                path, who = self.workspace / places[rank]["path"], f"the config of rank {rank}"
                limit_s = min(VISIBLE_LIMIT_S, self.control.limit_s / 2)
                self._unpack(rank, *await_state(path, partial(places[rank].get, "checksum"), who, limit_s))
                _unlink(path)
            elif not self._read_segment(rank, places[rank], sizes[rank]):
                unseen.append(rank)
        if unseen:
            _warn_once(f"ranks {unseen} share no memory with rank {self.first}: tensors travel over the network")
        return unseen

    def _read_segment(self, rank: int, place: dict[str, str] | None, nbytes: int) -> bool:
        if place is None:
            return False
        path = Path(place["path"])
        try:
            buffer = map_segment(path, nbytes)
        except FileNotFoundError:  # containers can share /dev/shm and have folders for temporary files of their own
            return False
        _unlink(path)  # from here on a kill leaves nothing
        self._unpack(rank, *from_buffer(buffer))
        return True

    def _transfer(self, sizes: dict[int, int]) -> None:
        """Send what the first rank could not open over the control group."""
        step = f"{self.name}: transfer"
        buffers: dict[int, mmap.mmap] = {}
        self.control.call(f"{self.name}: make room", partial(self._make_room, sizes, buffers))
        bytes_of = {rank: torch.frombuffer(buffer, dtype=torch.uint8) for rank, buffer in buffers.items()}
        for begin in range(0, max(sizes.values()), CHUNK_BYTES):
            parts = {rank: data[begin : begin + CHUNK_BYTES] for rank, data in bytes_of.items()}
            if self.control.rank == self.first:
                self.control.transfer(step, {}, parts)
            else:
                mine = parts.get(self.control.rank)
                self.control.transfer(step, {} if mine is None else {self.first: mine}, {})
        if self.control.rank == self.first:
            for rank, buffer in buffers.items():
                self._unpack(rank, *from_buffer(buffer))

    def _make_room(self, sizes: dict[int, int], buffers: dict[int, mmap.mmap]) -> None:
        """Memory for all that comes to this rank, or goes from it."""
        if self.control.rank == self.first:
            buffers.update({rank: mmap.mmap(-1, nbytes) for rank, nbytes in sizes.items()})
        elif self.control.rank in sizes:
            buffers[self.control.rank] = mmap.mmap(-1, self.layout.nbytes)
            copy_into(buffers[self.control.rank], self.layout, self.tensors)

    def _unpack(self, rank: int, metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
        self.values[rank] = unflatten(json.loads(metadata[TREE]), tensors)


class _Refused:
    """Whether the kernel refused this process to read another's memory, or another to read this one's."""

    by_kernel = False


def _make_offer(offer: peer_memory.Offer | None, reader: dict[str, Any]) -> list[peer_memory.Range] | None:
    if offer is None or not peer_memory.is_neighbour(reader):
        return None
    peer_memory.allow(reader["pid"])
    return offer.ranges


def _refuse_unlike(name: str, ranks: list[int], notes: dict[int, dict[str, Any]]) -> None:
    """Raise the same UserError on every rank when they were called with what does not fit together."""
    first = next(iter(notes.values()))
    for key, what in (("ranks", "the ranks"), ("nfs", "whether there is a workspace path")):
        if any(note[key] != first[key] for note in notes.values()):
            given = {rank: note[key] for rank, note in notes.items()}
            raise UserError(f"{name} must be told the same by all ranks, but {what} differ: {given}")
    kind = notes[ranks[0]]["kind"]
    if unlike := [rank for rank in ranks if notes[rank]["kind"] != kind]:
        given_text = ", ".join(f"rank {rank} has {notes[rank]['kind']}" for rank in unlike)
        raise UserError(
            f"{name} needs one dtype and shape on all ranks: rank {ranks[0]} has {kind}, but {given_text}; "
            "use get_configs_parallel for parts that differ"
        )


def _unlink(path: Path) -> None:
    """Take a name away. An error here would hide the one that all ranks know of."""
    with suppress(OSError):
        path.unlink()


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)
