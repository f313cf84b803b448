"""Ends what a killed process leaves behind: `python -P -m infra.guard`, with its stdin a pipe that the process holds.

Prefect's embedded server is a child of the flow process and is stopped by an exit handler, which SIGKILL does not
run. This small process remembers the children of its parent and ends those that outlive it. Ranks do not need
it: they have a supervisor of their own, which ends by itself and is left alone here.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra import supervisor

POLL_S = 1.0
GRACE_S = 5.0
_SUPERVISOR = Path(supervisor.__file__).name.encode()


@contextmanager
def guarded() -> Iterator[None]:
    """While open, children of this process die with it, even if it is killed by SIGKILL."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "infra.guard"],  # -P: nothing in the current folder is imported
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the parent
    )
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # somebody ended the guard: nothing depends on it
            process.communicate(b"done")  # this process ends by itself: exit handlers will run


def main() -> None:
    """Watch until the pipe closes; end the children that are left unless the parent said that it ends by itself."""
    parent = os.getppid()
    known: set[tuple[int, int]] = set()  # (pid, start time): a pid alone may be given to another process
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        known |= children(parent)
    if sys.stdin.buffer.read():
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, _ in known & living():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and known & living():
            time.sleep(0.1)


def children(parent: int) -> set[tuple[int, int]]:
    """(pid, start time) of the living children of a process, but for this one and supervisors."""
    return {
        (pid, process.start)
        for pid, process in supervisor.processes().items()
        if process.parent == parent and pid != os.getpid() and _SUPERVISOR not in _command_line(pid)
    }


def living() -> set[tuple[int, int]]:
    """(pid, start time) of every living process."""
    return {(pid, process.start) for pid, process in supervisor.processes().items() if process.lives}


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


if __name__ == "__main__":
    main()
