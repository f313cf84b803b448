"""What of a rank's log is passed on: bounded, readable, and with the end of it when it matters."""

from infra.follow import BACKLOG_BYTES, Limits, LogFollower, follow, read_tail

WIDE = Limits(lines=1000, burst=1000)


class Followed:
    """A follower of a new file, and what it passed on."""

    def __init__(self, folder, limits=WIDE):
        self.path = folder / "rank-0.log"
        self.lines: list[str] = []
        self.follower = LogFollower(
            3, self.path, lambda rank, text: self.lines.append(f"{rank} {text}"), limits=limits
        )

    def write(self, data: bytes) -> list[str]:
        """Append and poll; returns what was passed on by that."""
        with self.path.open("ab") as file:
            file.write(data)
        before = len(self.lines)
        self.follower.poll()
        return self.lines[before:]


def test_no_file_yet(tmp_path):
    followed = Followed(tmp_path)
    assert followed.follower.poll() is False
    followed.follower.close(show_tail=True)
    assert followed.lines == []


def test_lines_are_passed_on_when_they_end(tmp_path):
    followed = Followed(tmp_path)
    assert followed.write(b"one\ntw") == ["3 one"]
    assert followed.write(b"o\r\n\n") == ["3 two"]
    followed.write(b"three")
    followed.follower.close()
    assert followed.lines == ["3 one", "3 two", "3 three"]


def test_progress_bar_collapses_to_last_state(tmp_path):
    followed = Followed(tmp_path)
    assert followed.write(b"\r1/3 [#  ]\r2/3 [## ]") == []
    assert followed.write(b"\r") == []
    assert followed.write(b"3/3 [###]\ndone\n") == ["3 3/3 [###]", "3 done"]
    bar = b"".join(b"\r%d/3000" % i for i in range(3000))
    assert followed.write(bar + b"\r\n") == ["3 2999/3000"]


def test_long_line_is_cut_with_a_mark(tmp_path):
    followed = Followed(tmp_path, Limits(line_bytes=10))
    followed.write(b"abcde")
    for _ in range(30):
        followed.write(b"x" * 100_000)
    assert followed.write(b"\nnext\n") == ["3 abcdexxxxx … [cut, 3000005 bytes]", "3 next"]


def test_bytes_that_are_not_text_are_replaced(tmp_path):
    followed = Followed(tmp_path)
    assert followed.write(b"\xff\xfe broken \xc3\x28\n") == ["3 �� broken �("]
    assert followed.write("größe\n".encode()) == ["3 größe"]
    assert followed.write(b"\x1b[31mred\x1b[0m\x00\x07\tend\n") == ["3 red\tend"]


def test_character_split_between_reads_survives(tmp_path):
    followed = Followed(tmp_path)
    followed.write(b"gr\xc3")
    assert followed.write(b"\xb6\n") == ["3 grö"]


def test_flood_is_limited_and_counted(tmp_path):
    followed = Followed(tmp_path, Limits(lines=100, burst=10, per_second=0))
    followed.write(b"".join(b"line %d\n" % i for i in range(5000)))
    assert followed.lines == [f"3 line {i}" for i in range(10)]
    followed.follower.close()
    assert followed.lines[10:] == [f"3 … 4990 lines not shown, full log: {followed.path}"]


def test_total_holds_even_when_output_is_slow(tmp_path):
    followed = Followed(tmp_path, Limits(lines=20, burst=5, per_second=1e9))
    for i in range(500):
        followed.write(b"%d\n" % i)
    followed.follower.close()
    assert followed.lines[:20] == [f"3 {i}" for i in range(20)]
    assert len(followed.lines) == 21


def test_tail_is_shown_after_a_failure(tmp_path):
    followed = Followed(tmp_path, Limits(lines=5, burst=5, per_second=0, tail=3))
    followed.write(b"".join(b"%d\n" % i for i in range(10)) + b"RuntimeError: the cause")
    followed.follower.close(show_tail=True)
    assert followed.lines[5:] == [
        f"3 … 3 lines not shown, full log: {followed.path}", "3 8", "3 9", "3 RuntimeError: the cause"
    ]  # fmt: skip


def test_tail_repeats_nothing(tmp_path):
    followed = Followed(tmp_path)
    followed.write(b"one\ntwo\n")
    followed.follower.close(show_tail=True)
    assert followed.lines == ["3 one", "3 two"]


def test_huge_backlog_is_skipped(tmp_path):
    followed = Followed(tmp_path, Limits(lines=5, burst=5, per_second=0, tail=2))
    with followed.path.open("wb") as file:
        file.truncate(5 * BACKLOG_BYTES)
        file.seek(0, 2)
        file.write(b"\nthe end\n")
    followed.follower.close()
    assert followed.lines[0] == f"3 … 34 MB not shown, full log: {followed.path}"
    assert followed.lines[2:] == ["3 the end"]


def test_ranks_share_the_limit(tmp_path):
    lines = []
    followers = follow(
        {rank: tmp_path / f"{rank}.log" for rank in range(4)}, lambda *line: lines.append(line), lines=80
    )
    for rank in followers:
        (tmp_path / f"{rank}.log").write_text("x\n" * 1000)
    for follower in followers.values():
        follower.close()
    assert [sum(rank == r for r, _ in lines) for rank in range(4)] == [21] * 4


def test_read_tail(tmp_path):
    path = tmp_path / "log"
    assert read_tail(path) == []
    path.write_text("".join(f"{i}\n" for i in range(1000)))
    assert read_tail(path) == [str(i) for i in range(950, 1000)]
