"""One pass over the source weights: are they finite, and how large is each row. Called by all ranks.

Runs before anything expensive. A weight with a NaN or an Inf would become a healthy-looking constant under an
integer or fp8 code, so it stops the run.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distribute.errors import SourceError
from distribute.job import Progress
from distribute.layers import FLOAT_DTYPES
from distribute.numerics.observers import count_nonfinite, rows_absmax
from distribute.ranks import Ranks
from distribute.source import Checkpoint
from distribute.tensors import read_tensor
from distribute.work import Piece, cut, share

#: Measurements of one tensor by the first row that they cover.
Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Found:
    """Non-finite values of one piece."""

    name: str
    nan: int
    inf: int
    first: tuple[int, ...]


def scan(
    checkpoint: Checkpoint,
    measured: Collection[str],
    ranks: Ranks,
    *,
    per_row: bool,
    workspace: Path,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Check every float tensor and measure the `measured` weights. Called by all ranks.

    Returns:
        on rank 0: absolute maximum by tensor name, fp32 [rows], or [1] unless `per_row`; empty on the other ranks.

    Raises:
        SourceError: a tensor holds NaN or Inf; names it, counts them and gives the first index.
    """
    entries = [entry for entry in checkpoint.tensors.values() if entry.dtype in FLOAT_DTYPES and entry.nbytes]
    pieces = [piece for entry in entries for piece in cut(entry.name, entry.shape, entry.nbytes)]
    own = share(pieces, ranks.world)[ranks.rank]
    progress.start("scan weights", sum(piece.nbytes for piece in own), "bytes")
    found: list[dict[str, Any]] = []
    rows: dict[str, Rows] = defaultdict(dict)
    with ranks.together("scan"):
        for piece in own:
            found += _check(checkpoint, piece, measured, rows, ranks.device)
            progress.advance(piece.nbytes)
        if not per_row:
            rows = {name: _largest(parts) for name, parts in rows.items()}
    gathered = ranks.gather({"found": found, "rows": dict(rows)}, workspace)
    merged: dict[str, torch.Tensor] = {}
    with ranks.together("scan"):
        if ranks.is_first:
            _refuse(
                [_Found(**(fault | {"first": tuple(fault["first"])})) for part in gathered for fault in part["found"]]
            )
            merged = _merge([part["rows"] for part in gathered], per_row=per_row)
    return merged


def _check(
    checkpoint: Checkpoint,
    piece: Piece,
    measured: Collection[str],
    rows: dict[str, Rows],
    device: torch.device,
) -> list[dict[str, Any]]:
    tensor = read_tensor(checkpoint, piece.name, piece.rows).to(device)
    if piece.name in measured and piece.rows is not None:
        part = rows[piece.name][str(piece.rows.start)] = rows_absmax(tensor).cpu()
        if bool(torch.isfinite(part).all()):
            return []
    counted = count_nonfinite(tensor)
    if counted.first is None:
        return []
    index = list(counted.first)
    if piece.rows is not None:
        index[0] += piece.rows.start
    return [{"name": piece.name, "nan": counted.nan, "inf": counted.inf, "first": index}]


def _refuse(found: list[_Found]) -> None:
    if not found:
        return
    by_name: dict[str, list[_Found]] = {}
    for fault in found:
        by_name.setdefault(fault.name, []).append(fault)
    lines = [
        f"{name} holds {sum(f.nan for f in faults)} NaN and {sum(f.inf for f in faults)} Inf, "
        f"first at index {list(min(f.first for f in faults))}"
        for name, faults in sorted(by_name.items())
    ]
    raise SourceError(
        f"{'; '.join(lines[:10])}; {len(lines)} damaged tensors in all: get an intact source checkpoint"
    )


def _merge(parts: list[dict[str, Rows]], *, per_row: bool) -> dict[str, torch.Tensor]:
    """The measurements of all ranks, in the order of rows; or the largest of each tensor, [1]."""
    pieces: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for part in parts:
        for name, found in part.items():
            pieces[name] |= {int(start): values for start, values in found.items()}
    rows = {name: torch.cat([found[start] for start in sorted(found)]) for name, found in sorted(pieces.items())}
    return rows if per_row else {name: values.max().reshape(1) for name, values in rows.items()}


def _largest(found: Rows) -> Rows:
    """One number [1] in place of one a row: what per tensor scales need, and far less to send."""
    return {min(found, key=int): torch.cat(list(found.values())).max().reshape(1)}
