"""How tensors are cut into rows and shared among ranks. Pure and torch-free: a function of sizes and world alone.

Files go in waves of as many files as there are ranks. In a wave the pieces, in the order of the plan, are shared in
contiguous runs of about equal bytes; each file is sealed (read once for its digest) by one rank. So no rank encodes
more than the mean of a wave and one piece.
"""

from collections import defaultdict
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
class Unit:
    """Tensors of one file that are written together: one, or all that are coded from the same rows of a weight."""

    outputs: tuple[Output, ...]

    @property
    def first(self) -> Output:
        """Stands for all where they are alike."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        """The module that is coded, or the one tensor."""
        return self.first.module if self.first.is_coded else self.first.name

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return sum(output.nbytes for output in self.outputs)

    def pieces(self) -> Iterable[Piece]:
        """The rows that are written at once. Rows of a coded unit are those of its weight."""
        first = self.first
        if first.codec == VALUE or not self.nbytes:
            return [Piece(self.name, None, self.nbytes)]
        if not first.is_coded:
            return cut(first.name, first.shape, first.nbytes, piece_bytes=PIECE_BYTES // 2)
        return self._coded_pieces(first.rows, max(1, PIECE_BYTES // (2 * first.columns)))

    def _coded_pieces(self, rows: int, step: int) -> Iterator[Piece]:
        together = self.first.together
        step = max(1, step // together) * together
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            nbytes = self.nbytes * stop // rows - self.nbytes * start // rows
            yield Piece(self.name, range(start, stop), nbytes)


def units(outputs: Iterable[Output]) -> list[Unit]:
    """Outputs of one file, in byte order, with those of a coded module together at the place of its first."""
    groups: dict[str, list[Output]] = defaultdict(list)
    for output in outputs:
        groups[output.module if output.is_coded else output.name].append(output)
    return [Unit(tuple(group)) for group in groups.values()]


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


def own_pieces(plan: Plan, files: Sequence[ShardFile], rank: int, world: int) -> Iterator[tuple[Unit, Piece]]:
    """A rank's pieces of the given files, wave by wave, as the ranks work through them."""
    for wave in waves(files, world):
        for unit, owners, before, total in _owners(plan, wave, world):
            if rank in owners:
                for piece in unit.pieces():
                    if len(owners) == 1 or _owner(before, piece.nbytes, total, world) == rank:
                        yield unit, piece
                    before += piece.nbytes


def spread(plan: Plan, world: int) -> Spread:
    """How the export of a plan spreads over `world` ranks."""
    encoded, sealed = [0] * world, [0] * world
    touched: set[tuple[int, str]] = set()
    for wave in waves(plan.files, world):
        for rank, file in enumerate(wave):
            sealed[rank] += file.size
        for unit, owners, before, total in _owners(plan, wave, world):
            pieces = unit.pieces() if len(owners) > 1 else [Piece(unit.name, None, unit.nbytes)]
            for piece in pieces:
                rank = _owner(before, piece.nbytes, total, world)
                encoded[rank] += piece.nbytes
                touched.add((rank, unit.first.file))
                before += piece.nbytes
    files = [0] * world
    for rank, _ in touched:
        files[rank] += 1
    return Spread(encoded, sealed, files)


def _owners(plan: Plan, wave: Sequence[ShardFile], world: int) -> Iterator[tuple[Unit, range, int, int]]:
    """(unit, ranks that its pieces may go to, bytes before it, bytes of the wave): most need not be cut to know."""
    work = [unit for file in wave for unit in units(plan.by_file[file.name])]
    total = sum(unit.nbytes for unit in work)
    before = 0
    for unit in work:
        first, last = (_owner(place, 0, total, world) for place in (before, before + unit.nbytes))
        yield unit, range(first, last + 1), before, total
        before += unit.nbytes


def _owner(before: int, nbytes: int, total: int, world: int) -> int:
    """The rank in whose equal part of the bytes the middle of a piece lies; doubled, to stay with integers."""
    return min((2 * before + nbytes) * world // (2 * max(1, total)), world - 1)
