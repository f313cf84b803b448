"""How tensors are cut into rows and shared among ranks. Pure and torch-free: a function of sizes and world alone.

Files go in waves of as many files as there are ranks. In a wave the pieces, in the order of the plan, are shared in
contiguous runs of about equal bytes; each file is sealed (read once for its digest) by one rank. So no rank encodes
more than the mean of a wave and one piece.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from distribute.plan import VALUE, Output, Plan
from distribute.shards import ShardFile

#: Source bytes that a rank holds at once: small enough that buffers are reused and stay in the cache.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor: the unit of work. `rows` is None for a tensor that is not cut (0-dim or empty)."""

    name: str
    rows: range | None
    nbytes: int


@dataclass(frozen=True)
class Spread:
    """What each rank does in an export, in the order of ranks."""

    encoded: list[int]  # bytes of the checkpoint that it writes
    sealed: list[int]  # bytes of the files that it reads for their digest
    files: list[int]  # files that it writes into

    def summary(self) -> dict[str, dict[str, float]]:
        """Bytes of the busiest rank and of the mean one, and their ratio, for both kinds of work."""
        loads = {"encode": self.encoded, "seal": self.sealed}
        means = {what: sum(load) / len(load) for what, load in loads.items()}
        return {
            what: {"busiest": max(load), "mean": means[what], "ratio": max(load) / (means[what] or 1)}
            for what, load in loads.items()
        }


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
    total = sum(piece.nbytes for piece in pieces)
    shares: list[list[Piece]] = [[] for _ in range(world)]
    before = 0
    for piece in pieces:
        shares[_owner(before, piece.nbytes, total, world)].append(piece)
        before += piece.nbytes
    return shares


def waves(files: Sequence[ShardFile], world: int) -> list[Sequence[ShardFile]]:
    """Files that are written at the same time; rank r seals every file of `wave[r::world]`."""
    return [files[start : start + world] for start in range(0, len(files), world)]


def own_pieces(plan: Plan, files: Sequence[ShardFile], rank: int, world: int) -> Iterator[tuple[Output, Piece]]:
    """A rank's pieces of the given files, wave by wave, as the ranks work through them."""
    for wave in waves(files, world):
        for output, owners, before, total in _owners(plan, wave, world):
            if rank in owners:
                for piece in _pieces(output):
                    if len(owners) == 1 or _owner(before, piece.nbytes, total, world) == rank:
                        yield output, piece
                    before += piece.nbytes


def spread(plan: Plan, world: int) -> Spread:
    """How the export of a plan spreads over `world` ranks."""
    encoded, sealed = [0] * world, [0] * world
    touched: set[tuple[int, str]] = set()
    for wave in waves(plan.files, world):
        for rank, file in enumerate(wave):
            sealed[rank] += file.size
        for output, owners, before, total in _owners(plan, wave, world):
            pieces = _pieces(output) if len(owners) > 1 else [Piece(output.name, None, output.nbytes)]
            for piece in pieces:
                rank = _owner(before, piece.nbytes, total, world)
                encoded[rank] += piece.nbytes
                touched.add((rank, output.file))
                before += piece.nbytes
    files = [0] * world
    for rank, _ in touched:
        files[rank] += 1
    return Spread(encoded, sealed, files)


def _owners(plan: Plan, wave: Sequence[ShardFile], world: int) -> Iterator[tuple[Output, range, int, int]]:
    """(output, ranks that its pieces may go to, bytes before it, bytes of the wave): most need not be cut to know."""
    outputs = [output for file in wave for output in plan.by_file[file.name]]
    total = sum(output.nbytes for output in outputs)
    before = 0
    for output in outputs:
        first, last = (_owner(place, 0, total, world) for place in (before, before + output.nbytes))
        yield output, range(first, last + 1), before, total
        before += output.nbytes


def _pieces(output: Output) -> Iterable[Piece]:
    if output.codec == VALUE:
        return [Piece(output.name, None, output.nbytes)]
    # The source is at least twice as wide.
    return cut(output.name, output.shape, output.nbytes, piece_bytes=PIECE_BYTES // 2)


def _owner(before: int, nbytes: int, total: int, world: int) -> int:
    """The rank in whose equal part of the bytes the middle of a piece lies; doubled, to stay with integers."""
    return min((2 * before + nbytes) * world // (2 * max(1, total)), world - 1)
