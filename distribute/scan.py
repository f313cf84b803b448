"""One pass over the source weights: are they finite, and how large is each. Called by all ranks.

Runs before anything expensive. A weight with a NaN or an Inf would become a healthy-looking constant under an
integer or fp8 code, so it stops the run.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distribute.errors import SourceError
from distribute.job import Progress
from distribute.layers import FLOAT_DTYPES, Matrix
from distribute.numerics.observers import count_nonfinite, merge, rows_absmax
from distribute.ranks import Ranks
from distribute.source import Checkpoint
from distribute.tensors import read_tensor
from distribute.work import Piece, cut, share


@dataclass(frozen=True)
class _Found:
    """Non-finite values of one piece."""

    name: str
    nan: int
    inf: int
    first: tuple[int, ...]


def scan(
    checkpoint: Checkpoint,
    measured: Mapping[str, Matrix],
    ranks: Ranks,
    *,
    workspace: Path,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Check every float tensor and measure the weights of the `measured` modules. Called by all ranks.

    Returns:
        on rank 0: absolute maximum by module, fp32 0-dim; empty on the other ranks.

    Raises:
        SourceError: a tensor holds NaN or Inf; names it, counts them and gives the first index.
    """
    entries = [entry for entry in checkpoint.tensors.values() if entry.dtype in FLOAT_DTYPES and entry.nbytes]
    by_source: dict[str, list[tuple[str, Matrix]]] = defaultdict(list)
    for module, matrix in measured.items():
        by_source[matrix.source].append((module, matrix))
    pieces = [piece for entry in entries for piece in cut(entry.name, entry.shape, entry.nbytes)]
    own = share(pieces, ranks.world)[ranks.rank]
    progress.start("scan weights", sum(piece.nbytes for piece in own), "bytes")
    found: list[dict[str, Any]] = []
    absmax: dict[str, torch.Tensor] = {}
    with ranks.together("scan"):
        for piece in own:
            found += _check(checkpoint, piece, by_source.get(piece.name, []), absmax, ranks.device)
            progress.advance(piece.nbytes)
    gathered = ranks.gather({"found": found, "absmax": absmax}, workspace)
    merged: dict[str, torch.Tensor] = {}
    with ranks.together("scan"):
        if ranks.is_first:
            _refuse(
                [_Found(**(fault | {"first": tuple(fault["first"])})) for part in gathered for fault in part["found"]]
            )
            for part in gathered:
                for module, value in part["absmax"].items():
                    merged[module] = merge(merged[module], value) if module in merged else value
    return dict(sorted(merged.items()))


def _check(
    checkpoint: Checkpoint,
    piece: Piece,
    modules: Sequence[tuple[str, Matrix]],
    absmax: dict[str, torch.Tensor],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Non-finite values of a piece; `absmax` takes what the piece says of the modules that it is a part of."""
    tensor = read_tensor(checkpoint, piece.name, piece.rows).to(device)
    if modules and piece.rows is not None:
        rows = rows_absmax(tensor.flatten(end_dim=-2)).cpu()
        start = piece.rows.start * (len(rows) // len(piece.rows))
        for module, matrix in modules:
            first = matrix.first_row - start
            if len(part := rows[max(0, first) : max(0, first + matrix.shape[0])]):
                value = part.max()
                absmax[module] = merge(absmax[module], value) if module in absmax else value
        if bool(torch.isfinite(rows).all()):
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
