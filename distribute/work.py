"""How tensors are cut into rows and shared among ranks. Pure and torch-free: a function of sizes and world alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

#: Source bytes that a rank holds at once: small enough that buffers are reused and stay in the cache.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor: the unit of work. `rows` is None for a tensor that is not cut (0-dim or empty)."""

    name: str
    rows: range | None
    nbytes: int


def cut(name: str, shape: Sequence[int], nbytes: int, *, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Pieces of a tensor: contiguous rows of at most `piece_bytes`, or one row where a row is larger."""
    if not shape or nbytes == 0:
        yield Piece(name, None, nbytes)
        return
    per_row = nbytes // shape[0]
    step = max(1, piece_bytes // per_row)
    for start in range(0, shape[0], step):
        rows = range(start, min(start + step, shape[0]))
        yield Piece(name, rows, len(rows) * per_row)


def share(pieces: Iterable[Piece], world: int) -> list[list[Piece]]:
    """Contiguous runs of about equal bytes, one a rank; every piece goes to exactly one rank."""
    pieces = list(pieces)
    total = sum(piece.nbytes for piece in pieces) or 1
    shares: list[list[Piece]] = [[] for _ in range(world)]
    before = 0
    for piece in pieces:
        middle = 2 * before + piece.nbytes  # doubled, to stay with integers
        shares[min(middle * world // (2 * total), world - 1)].append(piece)
        before += piece.nbytes
    return shares
