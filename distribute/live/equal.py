"""The proof that what is written once is equal wherever it is held: on several ranks, or under several names.

Replicas are compared by digest, one for all that the same ranks share; tied tensors by their bytes on each rank;
plans by digest.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from distribute.errors import UserError
from distribute.live.collect import SHOWN, Meshes, StateTensor, kind_of, part_held, words_of
from distribute.live.layout import Layout, Part, overlaps, part_of, replicas, rows_and_width
from distribute.live.redistribute import local_rows
from distribute.ranks import Ranks
from distribute.tensors import to_bytes

BLOCK_BYTES = 16 << 20  # of a replica, digested at a time


def check_replicas(ranks: Ranks, state: Mapping[str, StateTensor], meshes: Mapping[str, Meshes]) -> None:
    """Compare what several ranks hold, by digest; a digest a group of replicas travels. Called by all ranks.

    Raises:
        UserError: the bytes differ, or lie so that they cannot be compared; names ranks and tensors.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in state.items():
        if overlaps(tensor.layout, meshes[name]):
            raise UserError(
                f"{name} lies on meshes of unlike shape, so ranks hold unlike parts of the same rows, which cannot "
                "be compared; place it on meshes of one shape"
            )
        holders = replicas(tensor.layout, meshes[name]).get(part_of(tensor.layout, tensor.mesh, ranks.rank), ())
        if len(holders) > 1:
            groups.setdefault(holders, []).append(name)
    with ranks.together("read replicas"):
        digests = {name: _digest(state[name].local) for names in groups.values() for name in names}
    total = {_key(holders): _join(digests[name] for name in names) for holders, names in groups.items()}
    totals = ranks.control.exchange("compare replicas", total)
    differing = _differing(totals)
    if differing:
        detail = {key: {name: digests[name] for name in names} for holders, names in groups.items()
                  if (key := _key(holders)) in differing}  # fmt: skip
        _raise_replicas(ranks.control.exchange("name replicas", detail))


def refuse_unequal_ties(
    state: Mapping[str, StateTensor], meshes: Mapping[str, Meshes], aliases: Mapping[str, str], rank: int
) -> None:
    """Check that an alias may be dropped. Each rank for the rows of both that it holds.

    Raises:
        UserError: the two differ, or lie so differently on the ranks that they cannot be compared.
    """
    for alias, canonical in aliases.items():
        one, other = state[alias], state[canonical]
        if one is other:
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not _comparable(
            (one.layout, meshes[alias]), (other.layout, meshes[canonical])
        ):
            raise UserError(
                f"{alias} and {canonical} are tied, but one is {words_of(kind_of(one))}, the other "
                f"{words_of(kind_of(other))}; shard tied parameters alike, or untie them (tie_word_embeddings)"
            )
        part, twin = part_held(one, rank), part_held(other, rank)
        for start, stop, at, other_at in _common_rows(part, twin):
            rows = local_rows(one.local, at, at + stop - start)
            others = local_rows(other.local, other_at, other_at + stop - start)
            if part.columns != twin.columns:
                rows, others = _common_columns(rows, part, twin), _common_columns(others, twin, part)
            if not _same_bits(rows, others):
                raise UserError(
                    f"{alias} and {canonical} are tied, but their values differ; untie them or make them equal"
                )


def refuse_unlike_plans(ranks: Ranks, dtype: torch.dtype, facts: Mapping[str, Any]) -> None:
    """Check that all ranks would write the same files: a plan follows from config, ties and quantizers too.

    Args:
        dtype: the model's.
        facts: tensor in the checkpoint -> JSON that decides its bytes.

    Raises:
        UserError: they would not; names ranks and tensors. The same on all ranks.
    """
    own = {"dtype of the model": str(dtype), **facts}
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    if len(set(ranks.control.exchange("compare the plan", digest).values())) == 1:
        return
    reference = ranks.share(own)
    unlike = sorted(name for name in {*own, *reference} if own.get(name) != reference.get(name))
    found = ranks.control.exchange("name differences", [unlike[:SHOWN], len(unlike)])
    text = "; ".join(
        f"rank {rank} {', '.join(names)}" + (f" and {count - len(names)} more" if count > len(names) else "")
        for rank, (names, count) in found.items()
        if count
    )
    raise UserError(
        f"ranks would not write what rank 0 writes: {text}; give all ranks the same config, tied weights and "
        "quantizer settings"
    )


def _comparable(one: tuple[Layout, Meshes], other: tuple[Layout, Meshes]) -> bool:
    """Whether every part of the two lies on some rank that holds it of both."""
    if one == other:
        return True
    (layout, meshes), (other_layout, other_meshes) = one, other
    if _is_whole(layout) or _is_whole(other_layout):
        return True  # some rank holds every part of the other
    rows, width = rows_and_width(layout.shape)
    held = [
        (part_of(layout, mesh, rank), part_of(other_layout, other_mesh, rank))
        for rank, (mesh, other_mesh) in enumerate(zip(meshes, other_meshes, strict=True))
    ]
    if any(part.rows and sum(map(len, part.columns)) != width for pair in held for part in pair):
        return False
    end = 0
    for start, stop in sorted({(start, stop) for pair in held for start, stop, *_ in _common_rows(*pair)}):
        if start > end:
            return False
        end = max(end, stop)
    return end == rows


def _is_whole(layout: Layout) -> bool:
    """Whether it is a plain tensor, which every rank holds whole."""
    return not layout.placements


def _common_columns(rows: torch.Tensor, part: Part, other: Part) -> torch.Tensor:
    """The columns of a part's rows that the other part has as well, in ascending order."""
    wanted = {column for ranges in other.columns for column in ranges}
    own = (column for ranges in part.columns for column in ranges)
    return rows[:, [place for place, column in enumerate(own) if column in wanted]]


def _common_rows(one: Part, other: Part) -> Iterator[tuple[int, int, int, int]]:
    """(first flat row, last, its row in one local part, its row in the other) of the rows that are in both."""
    for run in one.rows:
        for twin in other.rows:
            start, stop = max(run.start, twin.start), min(run.stop, twin.stop)
            if start < stop:
                yield start, stop, run.at + start - run.start, twin.at + start - twin.start


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    bits = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def _digest(local: torch.Tensor) -> str:
    digest = hashlib.sha256()
    rows, width = rows_and_width(local.shape)
    step = max(1, BLOCK_BYTES // max(1, width * local.element_size()))
    for start in range(0, rows, step):
        digest.update(to_bytes(local_rows(local, start, min(start + step, rows))))
    return digest.hexdigest()


def _join(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _key(holders: Sequence[int]) -> str:
    return ",".join(map(str, holders))


def _differing(totals: Mapping[int, Mapping[str, str]]) -> set[str]:
    seen: dict[str, set[str]] = {}
    for total in totals.values():
        for key, digest in total.items():
            seen.setdefault(key, set()).add(digest)
    return {key for key, digests in seen.items() if len(digests) > 1}


def _raise_replicas(details: Mapping[int, Mapping[str, Mapping[str, str]]]) -> None:
    faults: list[str] = []
    for key in sorted({key for detail in details.values() for key in detail}):
        holders = [int(rank) for rank in key.split(",")]
        first = details[holders[0]][key]
        for rank in holders[1:]:
            faults += [f"{name} of rank {rank} is not that of rank {holders[0]}"
                       for name, digest in details[rank][key].items() if digest != first[name]]  # fmt: skip
    more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    raise UserError(
        f"replicas differ between ranks: {'; '.join(faults[:SHOWN])}{more}; "
        "synchronise the model first (broadcast weights, all-reduce amax values)"
    )
