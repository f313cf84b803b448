"""The state of a live model as this rank holds it; names, dtypes, shapes and placements compared with other ranks.

Reads references only: nothing is copied, moved or gathered. What cannot be written is refused here, by name,
before any rank starts to wait for another.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distribute.errors import UserError
from distribute.live.layout import Layout, Mesh, Part, layout_of, part_of
from distribute.live.redistribute import local_rows
from distribute.ranks import Ranks
from distribute.tensors import NAMES

SHOWN = 5  # differences named in one error
Meshes = tuple[Mesh | None, ...]  # of one tensor, by rank


@dataclass(frozen=True)
class StateTensor:
    """An entry of a model's `state_dict`; `local` is this rank's part of it, on its device."""

    name: str
    dtype: torch.dtype
    layout: Layout
    mesh: Mesh | None
    local: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.layout.shape


def read_state(state_dict: Mapping[str, Any]) -> dict[str, StateTensor]:
    """Every tensor of a model's `state_dict`, in the order of names. Each rank for itself.

    Raises:
        UserError: a tensor has no data (meta), is Partial, or has a layout or dtype that cannot be stored.
    """
    state = {}
    for name, value in sorted(state_dict.items()):
        if not isinstance(value, torch.Tensor):
            raise UserError(f"{name} in the model's state is a {type(value).__name__}; only tensors can be exported")
        if value.dtype not in NAMES:
            raise UserError(f"{name} has dtype {value.dtype}; these can be stored: {', '.join(map(str, NAMES))}")
        layout, mesh, local = layout_of(name, value)
        state[name] = StateTensor(name, value.dtype, layout, mesh, local.detach())
    return state


def compare(ranks: Ranks, state: Mapping[str, StateTensor]) -> dict[str, Meshes]:
    """For every tensor the mesh of each rank, by rank. Called by all ranks.

    Ranks may differ in their meshes alone: in expert parallelism each data-parallel replica has its own.

    Raises:
        UserError: names, dtypes, shapes or placements differ; names ranks and tensors.
    """
    own_meshes = list(dict.fromkeys(tensor.mesh for tensor in state.values()))
    numbers = {mesh: number for number, mesh in enumerate(own_meshes)}
    kinds = {name: [*kind_of(tensor), numbers[tensor.mesh]] for name, tensor in state.items()}
    digest = hashlib.sha256(json.dumps(kinds).encode()).hexdigest()
    record = [digest, [mesh and [mesh.ranks, mesh.shape] for mesh in own_meshes]]
    records = ranks.control.exchange("compare the state", record)
    if len({digest for digest, _ in records.values()}) > 1:
        _raise_difference(ranks, kinds)
    tables = [[_mesh(plain) for plain in records[rank][1]] for rank in range(ranks.world)]
    by_number = [tuple(table[number] for table in tables) for number in range(len(own_meshes))]
    return {name: by_number[numbers[tensor.mesh]] for name, tensor in state.items()}


def measure_rows(
    ranks: Ranks, spans: Mapping[str, Mapping[int, range]], state: Mapping[str, StateTensor]
) -> dict[str, dict[int, torch.Tensor]]:
    """absmax of each row, fp32 CPU [rows], of spans of flat rows, over all ranks. Called by all ranks.

    Nothing but these vectors travels.
    """
    places = [(name, place, span) for name, found in spans.items() for place, span in found.items()]
    with ranks.together("measure"):
        parts = [_row_absmax(state[name], span, ranks.rank) for name, _, span in places]
    measured: dict[str, dict[int, torch.Tensor]] = {}
    if places:
        whole = ranks.absmax(torch.cat(parts))
        sizes = [len(span) for _, _, span in places]
        for (name, place, _), absmax in zip(places, whole.split(sizes), strict=True):
            measured.setdefault(name, {})[place] = absmax
    return measured


def part_held(tensor: StateTensor, rank: int) -> Part:
    """The rows and columns that a rank holds of a tensor whose mesh is its own."""
    return part_of(tensor.layout, tensor.mesh, rank)


def _row_absmax(tensor: StateTensor, span: range, rank: int) -> torch.Tensor:
    """fp32 CPU [rows of the span] of what this rank holds; 0 for rows it does not hold."""
    absmax = torch.zeros(len(span), dtype=torch.float32, device="cpu")
    part = part_held(tensor, rank)
    if not part.rows:
        return absmax
    for run in part.rows:
        start, stop = max(run.start, span.start), min(run.stop, span.stop)
        if start < stop:
            at = run.at + start - run.start
            rows = local_rows(tensor.local, at, at + stop - start)
            absmax[start - span.start : stop - span.start] = rows.abs().amax(1).to("cpu", torch.float32)
    return absmax


def kind_of(tensor: StateTensor) -> list[Any]:
    """Dtype, shape and placements, as JSON."""
    placements = [list(placement) for placement in tensor.layout.placements]
    return [NAMES[tensor.dtype], list(tensor.shape), placements]


def words_of(kind: Sequence[Any]) -> str:
    """The same for people."""
    return f"{kind[0]} {kind[1]} placed {kind[2] or 'whole on each rank'}"


def _mesh(plain: Any) -> Mesh | None:
    return plain and Mesh(tuple(plain[0]), tuple(plain[1]))


def _raise_difference(ranks: Ranks, kinds: Mapping[str, list[Any]]) -> None:
    """Compare with rank 0, whose list all get, and let all ranks raise the same error."""
    reference = ranks.share(kinds)
    unlike = [
        (f"has no {name}" if name not in kinds else f"has {name}, which rank 0 lacks" if name not in reference
         else f"has {name} as {words_of(kinds[name])}, rank 0 as {words_of(reference[name])}")
        for name in sorted({*kinds, *reference}) if kinds.get(name) != reference.get(name)
    ]  # fmt: skip
    found = ranks.control.exchange("name differences", [len(unlike), unlike[:SHOWN]])
    text = "; ".join(
        f"rank {rank} {', '.join(shown)}" + (f" and {count - len(shown)} more" if count > len(shown) else "")
        for rank, (count, shown) in found.items()
        if count
    )
    raise UserError(f"the model's state differs between ranks: {text}; every rank must hold the same model")
