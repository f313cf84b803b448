"""Every row goes to exactly one rank, and no rank has more to do than the mean and one piece."""

from collections import defaultdict
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from distribute.plan import COPY, VALUE, Output, Plan
from distribute.shards import ShardFile
from distribute.work import PIECE_BYTES, cut, own_pieces, share, spread, units, waves

shapes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=20)
#: Tensors of files: (rows, bytes of a row, whether it is a value); some are larger than a piece.
tensors = st.tuples(st.integers(0, 5), st.sampled_from([1, 4, 3000, PIECE_BYTES // 5, PIECE_BYTES]), st.booleans())
folders = st.lists(st.lists(tensors, min_size=1, max_size=6), min_size=1, max_size=9)


@given(shapes, st.integers(1, 300), st.integers(1, 7))
def test_every_row_goes_to_exactly_one_rank(sizes: list[tuple[int, int]], piece_bytes: int, world: int) -> None:
    pieces = [p for i, s in enumerate(sizes) for p in cut(f"t{i}", s, s[0] * s[1], piece_bytes=piece_bytes)]
    shares = share(pieces, world)
    assert [piece for part in shares for piece in part] == pieces
    for i, (rows, _) in enumerate(sizes):
        covered = [row for piece in pieces if piece.name == f"t{i}" for row in piece.rows or ()]
        assert covered == list(range(rows))


@given(shapes, st.integers(1, 300), st.integers(1, 7))
def test_shares_are_about_equal(sizes: list[tuple[int, int]], piece_bytes: int, world: int) -> None:
    pieces = [p for i, s in enumerate(sizes) for p in cut(f"t{i}", s, s[0] * s[1], piece_bytes=piece_bytes)]
    total = sum(piece.nbytes for piece in pieces)
    largest = max((piece.nbytes for piece in pieces), default=0)
    for part in share(pieces, world):
        assert sum(piece.nbytes for piece in part) <= total / world + largest + 1


def test_a_scalar_and_an_empty_tensor_are_one_piece() -> None:
    assert [piece.rows for piece in cut("s", (), 4)] == [None]
    assert [piece.rows for piece in cut("e", (0, 5), 0)] == [None]


def test_a_row_larger_than_a_piece_is_not_cut() -> None:
    assert [piece.rows for piece in cut("w", (2, 100), 200, piece_bytes=10)] == [range(1), range(1, 2)]


def _plan(folder: list[list[tuple[int, int, bool]]]) -> Plan:
    """What `own_pieces` and `spread` look at: files and their outputs."""
    files: list[ShardFile] = []
    by_file: dict[str, list[Output]] = {}
    for number, group in enumerate(folder):
        name, end = f"f{number}", 8
        by_file[name] = []
        for place, (rows, width, value) in enumerate(group):
            begin, end = end, end + rows * width
            codec = VALUE if value else COPY
            by_file[name].append(Output(f"{name}.{place}", "U8", (rows, width), name, begin, end, codec))
        files.append(ShardFile(name, end))
    return SimpleNamespace(files=files, by_file=by_file)  # type: ignore[return-value]


@given(folders, st.integers(1, 7))
def test_the_pieces_of_all_ranks_are_every_byte_once(folder: list[list[tuple[int, int, bool]]], world: int) -> None:
    plan = _plan(folder)
    seen: dict[str, list[range]] = defaultdict(list)
    for rank in range(world):
        for unit, piece in own_pieces(plan, plan.files, rank, world):
            seen[unit.name].append(piece.rows if piece.rows is not None else range(unit.first.shape[0]))
    for output in (output for outputs in plan.by_file.values() for output in outputs):
        rows = sorted(seen.pop(output.name), key=lambda part: part.start)
        assert [row for part in rows for row in part] == list(range(output.shape[0]))
    assert not seen


@given(folders, st.integers(1, 7))
def test_pieces_are_shared_as_if_all_were_cut_first(folder: list[list[tuple[int, int, bool]]], world: int) -> None:
    plan = _plan(folder)
    for wave in waves(plan.files, world):
        outputs = [output for file in wave for output in plan.by_file[file.name]]
        expected = share((p for output in outputs for _, p in own_pieces(_only(output), _files(output), 0, 1)), world)
        assert [[p for _, p in own_pieces(plan, wave, rank, world)] for rank in range(world)] == expected


@given(folders, st.integers(1, 7))
def test_a_spread_counts_what_the_ranks_do(folder: list[list[tuple[int, int, bool]]], world: int) -> None:
    plan = _plan(folder)
    work = spread(plan, world)
    for rank in range(world):
        own = list(own_pieces(plan, plan.files, rank, world))
        assert work.encoded[rank] == sum(piece.nbytes for _, piece in own)
        assert work.files[rank] == len({unit.first.file for unit, _ in own})
        sealed = [file.size for wave in waves(plan.files, world) for file in wave[rank::world]]
        assert work.sealed[rank] == sum(sealed)
    assert sum(work.sealed) == sum(file.size for file in plan.files)


@given(folders, st.integers(1, 7))
def test_the_busiest_rank_encodes_the_mean_and_a_piece_of_each_wave(
    folder: list[list[tuple[int, int, bool]]], world: int
) -> None:
    plan = _plan(folder)
    allowed = 0.0
    for wave in waves(plan.files, world):
        pieces = [piece.nbytes for _, piece in own_pieces(plan, wave, 0, 1)]
        allowed += sum(pieces) / world + max(pieces) + 1
    assert max(spread(plan, world).encoded) <= allowed


@given(st.integers(1, 700), st.sampled_from([1, 2, 8, 128]), st.integers(1, 5))
def test_rows_that_are_coded_together_are_never_cut(rows: int, together: int, world: int) -> None:
    weight = Output("m.w", "U8", (rows, 9000), "f", 0, rows * 9000, "codec", "m.w", "m", 0, rows, 9000, 1, together)
    scale = Output(
        "m.s", "U8", (-(-rows // together), 1), "f", 0, 9, "codec", "m.w", "m", 0, rows, 9000, together, together
    )
    copied = Output("a", "U8", (3, 3), "f", 0, 9, COPY, "a")
    (first, second) = units([copied, weight, scale])
    assert (first.outputs, second.outputs) == ((copied,), (weight, scale))
    plan = SimpleNamespace(by_file={"f": [copied, weight, scale]})
    files = [ShardFile("f", 1)]
    own = [
        piece.rows for rank in range(world) for unit, piece in own_pieces(plan, files, rank, world) if unit == second
    ]
    assert [row for part in own for row in part] == list(range(rows))
    assert all(part.start % together == 0 for part in own)
    assert sum(piece.nbytes for piece in second.pieces()) == second.nbytes


def _only(output: Output) -> Plan:
    return SimpleNamespace(by_file={output.file: [output]})  # type: ignore[return-value]


def _files(output: Output) -> list[ShardFile]:
    return [ShardFile(output.file, output.end)]
