"""Follows the log files of ranks while they grow and passes on what a person wants to see of them.

The files hold everything; what is passed on is bounded, because each line may become a row in a database:
carriage-return progress bars collapse to their last state, over-long lines are cut with a mark, bytes that are not
UTF-8 are replaced, and a token bucket with a total limits the number. What was left out is counted and said.
Nothing here blocks, and no thread is started: the owner calls `poll` from its own loop.
"""

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

OnLine = Callable[[int, str], None]  # (rank, text)

CHUNK_BYTES = 1 << 20  # read at most so much of one file in one poll
BACKLOG_BYTES = 8 << 20  # a file that is further ahead is not read in full
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")  # terminal sequences, control characters


@dataclass(frozen=True)
class Limits:
    """How much of one rank's output is passed on."""

    lines: int = 200  # in all
    burst: int = 40  # at once, then ...
    per_second: float = 1.0
    line_bytes: int = 2000  # longer lines are cut
    tail: int = 50  # lines kept for a failure's report


class LogFollower:
    """One rank's log file."""

    def __init__(self, rank: int, path: Path, on_line: OnLine, *, limits: Limits):
        self._rank = rank
        self._path = path
        self._on_line = on_line
        self._limits = limits
        self._offset = 0
        self._open = b""  # the unfinished last line, cut to line_bytes
        self._open_bytes = 0  # its real length
        self._returned = False  # a carriage return came: the next byte starts the line again
        self._left = limits.lines
        self._tokens = float(limits.burst)
        self._clock = time.monotonic()
        self._hidden = 0  # lines read but not passed on
        self._skipped_bytes = 0  # not even read
        self._last: deque[tuple[str, bool]] = deque(maxlen=limits.tail)  # (text, passed on?)

    def poll(self) -> bool:
        """Read what is new and pass it on; returns whether there may be more to read at once."""
        try:
            with self._path.open("rb") as file:
                self._skip(os.fstat(file.fileno()).st_size)
                file.seek(self._offset)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return False
        self._offset += len(data)
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._extend(piece)
            self._finish_line()
        self._extend(rest)
        return len(data) == CHUNK_BYTES

    def close(self, *, show_tail: bool = False) -> None:
        """Read the rest and say how much was left out; `show_tail` passes on the last lines whatever the limits."""
        while self.poll():
            pass
        if self._open:
            self._finish_line()
        if show_tail:
            missing = [text for text, shown in self._last if not shown]
            self._hidden -= len(missing)
            self._say_hidden()
            for text in missing:
                self._on_line(self._rank, text)
        self._say_hidden()

    @property
    def last_lines(self) -> list[str]:
        """The last lines, passed on or not."""
        return [text for text, _ in self._last]

    def _skip(self, size: int) -> None:
        """Give up the oldest part of a backlog that would take too long to read."""
        if size - self._offset > BACKLOG_BYTES:
            self._skipped_bytes += size - BACKLOG_BYTES - self._offset
            self._offset = size - BACKLOG_BYTES

    def _extend(self, piece: bytes) -> None:
        """Add to the open line. What follows a carriage return replaces what came before it."""
        for index, part in enumerate(piece.split(b"\r")):
            self._returned |= index > 0
            if part and self._returned:
                self._open, self._open_bytes, self._returned = b"", 0, False
            self._open += part[: max(0, self._limits.line_bytes - len(self._open))]
            self._open_bytes += len(part)

    def _finish_line(self) -> None:
        text = _CONTROL.sub("", self._open.decode("utf-8", errors="replace")).rstrip()
        if self._open_bytes > self._limits.line_bytes:
            text += f" … [cut, {self._open_bytes} bytes]"
        self._open, self._open_bytes, self._returned = b"", 0, False
        if not text:
            return
        shown = self._take_token()
        self._last.append((text, shown))
        if shown:
            self._say_hidden()
            self._on_line(self._rank, text)
        else:
            self._hidden += 1

    def _take_token(self) -> bool:
        now = time.monotonic()
        self._tokens = min(self._limits.burst, self._tokens + (now - self._clock) * self._limits.per_second)
        self._clock = now
        if self._tokens < 1 or self._left < 1:
            return False
        self._tokens -= 1
        self._left -= 2 if self._hidden else 1  # the note about hidden lines counts too
        return True

    def _say_hidden(self) -> None:
        parts = [f"{self._hidden} lines"] if self._hidden > 0 else []
        parts += [f"{self._skipped_bytes / 1e6:.0f} MB"] if self._skipped_bytes else []
        if parts:
            self._on_line(self._rank, f"… {' and '.join(parts)} not shown, full log: {self._path}")
        self._hidden = self._skipped_bytes = 0


def follow(paths: Mapping[int, Path], on_line: OnLine, *, lines: int = 400) -> dict[int, LogFollower]:
    """One follower a rank; `lines` is for all of them together."""
    share = max(10, lines // max(1, len(paths)))
    limits = Limits(lines=share, burst=min(40, share))
    return {rank: LogFollower(rank, path, on_line, limits=limits) for rank, path in paths.items()}


def read_tail(path: Path, *, limits: Limits = Limits()) -> list[str]:
    """The last lines of a whole log file, as a follower shows them; empty when there is no such file."""
    follower = LogFollower(0, path, lambda rank, text: None, limits=limits)
    follower.close()
    return follower.last_lines
