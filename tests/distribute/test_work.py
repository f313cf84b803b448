from hypothesis import given
from hypothesis import strategies as st

from distribute.work import cut, share

shapes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=20)


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
