"""Gathers by which the first of some ranks sees what all of them hold: a tensor each, or a nested config each.

Data goes through shared memory of one host, or through files in a workspace folder; control records go over gloo.
A segment or file has a name only until the first rank has opened it, before the caller's body runs, so nothing is
left behind even by a kill in a long body. A rank that fails, here or in the body, makes all of them raise the same
error. No weight is gathered by any stage of the pipeline: these are for records, scales and merges of small parts.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distribute.control import Control
from distribute.errors import UserError
from distribute.nested import flatten, unflatten
from distribute.segments import collect_dead_once, host, map_segment, new_name, write_segment
from distribute.state import copy_into, from_buffer, plan_layout
from distribute.state_file import VISIBLE_LIMIT_S, await_state, make_private_folder, write_state

TREE = "tree"


@contextmanager
def get_tensors_parallel(
    tensor: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None = None
) -> Iterator[list[torch.Tensor]]:
    """Every rank's tensor on the first of `ranks`, in the order of `ranks`; an empty list on the others.

    Called by all of `ranks` (global ranks of one host; one is enough), which leave the body together. The list is
    emptied at the end; a tensor kept from it stays valid and keeps its memory. Tensors lie on the CPU, bit for bit;
    the first rank's own is not copied if it is there already.

    Args:
        tensor: any dense tensor; same dtype and shape on all ranks.
        ranks: the same on all of them.
        group: a process group that `ranks` belong to (None: the default group). It carries no traffic.

    Raises:
        UserError: dtype or shape differs (names the ranks), or an argument is wrong.
        RankError: a rank failed, here or in the body. The same error on all ranks, as with UserError.
    """
    name = "get_tensors_parallel"
    control = _join(ranks, group)
    with control.together(name):
        _refuse_unlike(control, name, tensor, ranks)
        tensors = [item.detach().cpu() for item in _collect(control, name, tensor, ranks, None)]
        try:
            yield tensors
        finally:
            tensors.clear()


@contextmanager
def get_configs_parallel(
    config: Any,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    workspace_path: Path | str | None = None,
) -> Iterator[list[Any]]:
    """Every rank's config on the first of `ranks`, in the order of `ranks`; an empty list on the others.

    Called by all of `ranks` (global ranks; one is enough), which leave the body together. The list is emptied at
    the end; a tensor kept from it stays valid and keeps its memory. The first rank's own config is the object it
    gave; tensors of the others lie on the CPU, bit for bit.

    Args:
        config: None, which keeps its place in the list; or dicts, lists, tuples and dataclasses (of classes that
            the first rank has imported) with dense tensors anywhere inside.
        ranks: the same on all of them.
        group: a process group that `ranks` belong to (None: the default group). It carries no traffic.
        workspace_path: a folder that all ranks see. None: shared memory, which takes ranks of one host.

    Raises:
        UserError: a value cannot be sent (names its path), an argument is wrong, or there is no room.
        RankError: a rank failed, here or in the body. The same error on all ranks, as with UserError.
    """
    name = "get_configs_parallel"
    control = _join(ranks, group)
    with control.together(name):
        configs = _collect(control, name, config, ranks, Path(workspace_path) if workspace_path is not None else None)
        try:
            yield configs
        finally:
            configs.clear()


def _join(ranks: Sequence[int], group: dist.ProcessGroup | None) -> Control:
    if group is not None and not set(ranks) <= set(dist.get_process_group_ranks(group)):
        members = dist.get_process_group_ranks(group)
        raise UserError(f"ranks {list(ranks)} are not all in the given group, which has ranks {members}")
    return Control.of(ranks)


def _refuse_unlike(control: Control, name: str, tensor: torch.Tensor, ranks: Sequence[int]) -> None:
    def kind() -> str:
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{name} was given a {type(tensor).__name__}; give a tensor")
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    kinds = control.call(f"{name}: compare", kind)
    unlike = [rank for rank in ranks if kinds[rank] != kinds[ranks[0]]]
    if unlike:
        given = ", ".join(f"rank {rank} has {kinds[rank]}" for rank in unlike)
        raise UserError(
            f"{name} needs one dtype and shape on all ranks: rank {ranks[0]} has {kinds[ranks[0]]}, but {given}; "
            "use get_configs_parallel for parts that differ"
        )


def _collect(control: Control, name: str, value: Any, ranks: Sequence[int], workspace: Path | None) -> list[Any]:
    """What each rank gave, on the first; nothing of it has a name any more when this returns or raises."""
    with ExitStack() as names:
        notes = control.call(f"{name}: send", partial(_send, control.rank, value, list(ranks), workspace, names))
        _check_notes(name, notes)
        values: list[Any] = []
        with control.together(f"{name}: receive"):
            if control.rank == ranks[0]:
                values = [value if rank == ranks[0] else _receive(rank, notes[rank], workspace) for rank in ranks]
        return values


def _send(rank: int, value: Any, ranks: list[int], workspace: Path | None, names: ExitStack) -> dict[str, Any]:
    """Leave a value where the first rank finds it; returns a note of where. `names` removes it again.

    Without a tensor element there is nothing to leave: the header alone travels in the note.
    """
    tree, tensors = flatten(value)  # on the first rank too: what is refused must not depend on the world size
    note: dict[str, Any] = {"ranks": ranks, "host": host(), "nfs": workspace is not None, "path": None, "head": None}
    if rank == ranks[0]:
        return note
    metadata = {TREE: json.dumps(tree)}
    layout = plan_layout(tensors, metadata)
    if not layout.has_data:
        return note | {"head": layout.head.decode("latin-1")}
    if workspace is None:
        path = write_segment(layout.nbytes, partial(copy_into, layout=layout, tensors=tensors))
        names.callback(path.unlink, missing_ok=True)
        return note | {"path": str(path), "nbytes": layout.nbytes}
    make_private_folder(workspace)
    collect_dead_once(workspace)
    path = workspace / new_name()
    names.callback(path.unlink, missing_ok=True)
    return note | {"path": path.name, "checksum": write_state(path, tensors, metadata)}


def _receive(rank: int, note: dict[str, Any], workspace: Path | None) -> Any:
    """What `_send` left; its name is gone afterwards, so that a kill from here on leaves nothing."""
    if note["path"] is None:
        metadata, tensors = from_buffer(bytearray(note["head"].encode("latin-1")))
        return unflatten(json.loads(metadata[TREE]), tensors)
    path = Path(note["path"]) if workspace is None else workspace / note["path"]
    if workspace is None:
        metadata, tensors = from_buffer(map_segment(path, note["nbytes"]))
    else:
        who = f"the config of rank {rank}"
        metadata, tensors = await_state(path, lambda: note["checksum"], who, VISIBLE_LIMIT_S)
    path.unlink(missing_ok=True)
    return unflatten(json.loads(metadata[TREE]), tensors)


def _check_notes(name: str, notes: dict[int, dict[str, Any]]) -> None:
    """Raise the same UserError on every rank when ranks were called with arguments that do not fit together."""
    first = next(iter(notes.values()))
    for key, what in (("ranks", "the ranks"), ("nfs", "whether there is a workspace path")):
        if any(note[key] != first[key] for note in notes.values()):
            given = {rank: note[key] for rank, note in notes.items()}
            raise UserError(f"{name} must be told the same by all ranks, but {what} differ: {given}")
    hosts = {note["host"] for note in notes.values()}
    if len(hosts) > 1 and not first["nfs"] and any(note["path"] for note in notes.values()):
        raise UserError(
            f"{name}: ranks {sorted(notes)} are on {len(hosts)} hosts, or in containers that do not share /dev/shm; "
            "give a workspace path that all of them see"
        )
