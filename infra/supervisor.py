"""Starts one command and makes sure that nothing of it survives. Standard library only: it starts fast and is small.

torchrun makes every rank the leader of a session of its own, so that neither a kill of torchrun nor of its process
group reaches them. This process therefore leads its own session, is the *subreaper* of everything below it (orphans
become its children and can still be found), and ends the whole tree on SIGTERM, SIGINT, its own deadline, a stall,
or the end of its stdin, which is the sign that the parent died, even by SIGKILL.

It exits only when no descendant lives: whoever waits for it, or for a lock it holds, knows that the tree is gone.
    python supervisor.py --folder STAGE [--deadline S] [--stall S] [--lock-fd N] -- COMMAND ...   (stdin: a pipe)
In STAGE it reads progress-*.json and logs/rank-*.exit and writes, last of all, exit.json.
"""

import argparse
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

GRACE_S = 4.0  # between SIGTERM and SIGKILL; keeps a shutdown well under 10 s
TICK_S = 0.5
KILL_INTERVAL_S = 0.05
REAP_S = 5.0  # after SIGKILL: how long the status of a dead command is waited for
# Names of shared-memory files say who made them (distribute/segments.py): boot, pid namespace, pid, start time.
SEGMENT = re.compile(r"nogather-([0-9a-f]{8})-(\d+)-(\d+)-(\d+)-.*")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


@dataclass
class ExitRecord:
    """What exit.json holds. Times are seconds since the epoch."""

    started: float
    ended: float = 0.0
    seconds: float = 0.0
    reason: str = "failed"  # finished, failed, not_started, terminated, interrupted, deadline, stalled, parent_gone
    exit_code: int | None = None  # the command's own; negative: ended by that signal; None: unknown
    first_failure: dict[str, Any] | None = (
        None  # {"rank", "exit_code", "time"} of the rank that first failed by itself
    )
    leftovers_killed: int = 0  # processes that had to be ended by SIGKILL
    segments_removed: int = 0  # files of dead ranks removed from /dev/shm (or the folder for temporary files)


class Process(NamedTuple):
    """One line of /proc."""

    parent: int  # pid
    state: str  # of the main thread, one letter; Z and X are dead
    threads: int
    start: int  # clock ticks after boot

    @property
    def lives(self) -> bool:
        """Whether it runs, or may run again."""
        # A main thread that ended before the others is a zombie until they end, and cannot be waited for.
        return self.state not in "ZX" or (self.state == "Z" and self.threads > 1)


def processes() -> dict[int, Process]:
    """Every process that can be seen, by pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                # The name in parentheses may itself contain spaces and parentheses: the last one ends it.
                fields = file.read().rpartition(b")")[2].split()
                found[int(entry)] = Process(int(fields[1]), fields[0].decode(), int(fields[17]), int(fields[19]))
    return found


def descendants(root: int) -> set[int]:
    """pids of all living processes below `root`, however deep."""
    table = processes()
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    below: set[int] = set()
    todo = [root]
    while todo:
        new = set(children.get(todo.pop(), ())) - below
        below |= new
        todo += new
    return {pid for pid in below if table[pid].lives}


def remove_segments(folders: Iterable[Path]) -> int:
    """Remove shared-memory files whose maker is dead; returns how many.

    Boot and pid namespace must be ours: elsewhere a pid says nothing, and its owner may live unseen.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:8]
    here = (boot, str(os.stat("/proc/self/ns/pid").st_ino))
    living = {(str(pid), str(process.start)) for pid, process in processes().items() if process.lives}
    removed = 0
    for path in (path for folder in folders for path in folder.glob("nogather-*")):
        match = SEGMENT.fullmatch(path.name)
        if match and match.groups()[:2] == here and match.groups()[2:] not in living:
            with suppress(OSError):  # another user's
                path.unlink()
                removed += 1
    return removed


def first_failure(folder: Path) -> dict[str, Any] | None:
    """The rank whose logs/rank-<r>.exit was the first to hold something else than 0."""
    failed = []
    for path in folder.glob("logs/rank-*.exit"):
        with suppress(OSError, ValueError):
            code = int(path.read_text())
            if code:
                failed.append((path.stat().st_mtime, int(path.stem.removeprefix("rank-")), code))
    if not failed:
        return None
    moment, rank, code = min(failed)
    # A shell says 128 + n for signal n.
    return {"rank": rank, "exit_code": 128 - code if code > 128 else code, "time": moment}


def call_prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} failed (Linux 3.4 or newer is needed)")


class Supervisor:
    """One command, its tree, and the reasons to end it."""

    def __init__(
        self,
        command: list[str],
        *,
        folder: Path,
        deadline_s: float | None,
        stall_s: float | None,
        grace_s: float,
    ):
        self._command = command
        self._folder = folder
        self._deadline_s = deadline_s
        self._stall_s = stall_s
        self._grace_s = grace_s
        self._parent = os.getppid()
        self._progress: tuple[object, float] = (None, time.monotonic())
        self._status: dict[int, int] = {}  # of every child reaped, orphans included
        self._wakeup, wakeup_write = os.pipe()
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write)
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the wake-up pipe says which one came
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def run(self, pass_fds: tuple[int, ...]) -> ExitRecord:
        """Start the command, wait for a reason to end, end everything, and tell, whatever goes wrong here."""
        record = ExitRecord(started=time.time())
        began = time.monotonic()
        try:
            self._run(pass_fds, record, began)
        finally:
            record.ended = time.time()
            record.seconds = round(time.monotonic() - began, 3)
            write_exit(self._folder, record)
        return record

    def _run(self, pass_fds: tuple[int, ...], record: ExitRecord, began: float) -> None:
        try:
            child = self._start(pass_fds)
        except OSError as error:
            sys.stderr.write(f"cannot start {self._command[0]}: {error}\n")
            record.reason = "not_started"
            return
        try:
            reason = self._wait(child.pid, began)
            record.first_failure = first_failure(self._folder)  # before ranks fail because they are ended
        finally:
            record.leftovers_killed = self._end_tree(child.pid)
            record.segments_removed = remove_segments((Path("/dev/shm"), Path(tempfile.gettempdir())))
        if child.pid in self._status:
            child.returncode = record.exit_code = os.waitstatus_to_exitcode(self._status[child.pid])
        record.reason = reason or ("finished" if record.exit_code == 0 else "failed")

    def _start(self, pass_fds: tuple[int, ...]) -> subprocess.Popen:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            pass_fds=pass_fds,
            # Should this very process be killed, torchrun gets SIGTERM and ends its ranks. Safe: there is one thread.
            preexec_fn=lambda: call_prctl(SET_PDEATHSIG, signal.SIGTERM),
        )

    def _wait(self, pid: int, began: float) -> str | None:
        """Until the command ended by itself (None) or there is a reason to end it."""
        while True:
            if reason := self._sleep() or self._late(began):
                return reason
            self._reap()
            if pid in self._status:
                return None

    def _sleep(self) -> str | None:
        """At most one tick; the reason when a signal or the end of stdin came."""
        ready, _, _ = select.select([0, self._wakeup], [], [], TICK_S)
        if self._wakeup in ready:
            numbers = os.read(self._wakeup, 4096)
            if signal.SIGINT in numbers:
                return "interrupted"
            if set(SIGNALS) & set(numbers):
                return "terminated"
        if 0 in ready and not os.read(0, 4096):
            return "parent_gone"
        # A write end inherited by some other child of the parent would keep stdin open.
        return "parent_gone" if os.getppid() != self._parent else None

    def _late(self, began: float) -> str | None:
        now = time.monotonic()
        if self._deadline_s is not None and now - began >= self._deadline_s:
            return "deadline"
        if self._stall_s is not None:
            state = {}
            for path in self._folder.glob("progress-*.json"):
                with suppress(OSError):
                    state[path.name] = path.stat().st_mtime_ns
            if state != self._progress[0]:
                self._progress = (state, now)
            elif now - self._progress[1] >= self._stall_s:
                return "stalled"
        return None

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (result := os.waitpid(-1, os.WNOHANG))[0]:
                self._status[result[0]] = result[1]

    def _end_tree(self, pid: int) -> int:
        """SIGTERM to every descendant, then SIGKILL until none is left; returns how many needed it.

        The status of the command `pid` is waited for, too, but not for ever: nothing depends on it.
        """
        self._reap()
        living = descendants(os.getpid())
        _send(signal.SIGTERM, living)
        limit = time.monotonic() + self._grace_s
        killed: set[int] = set()
        while living or (pid not in self._status and time.monotonic() < limit + REAP_S):
            time.sleep(KILL_INTERVAL_S)
            self._reap()
            living = descendants(os.getpid())
            if time.monotonic() >= limit:
                _send(signal.SIGKILL, living)
                killed |= living
        self._reap()
        return len(killed)


def _send(number: int, pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def write_exit(folder: Path, record: ExitRecord) -> None:
    """Write exit.json so that a reader sees nothing or the whole of it."""
    temporary = folder / f".exit.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    temporary.replace(folder / "exit.json")


def main(argv: list[str]) -> int:
    """Run as a program; exit code 0 only when the command finished with 0."""
    parser = argparse.ArgumentParser(prog="supervisor", description="Run a command so that nothing of it survives.")
    parser.add_argument("--folder", type=Path, required=True, help="the stage's folder")
    parser.add_argument("--deadline", type=float, metavar="S", help="end the command after this many seconds")
    parser.add_argument("--stall", type=float, metavar="S", help="end it when no progress file changed for so long")
    parser.add_argument("--grace", type=float, metavar="S", default=GRACE_S, help="between SIGTERM and SIGKILL")
    parser.add_argument("--lock-fd", type=int, metavar="N", help="descriptor of a lock held until the tree is gone")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    with suppress(PermissionError):  # already the leader of a session
        os.setsid()
    call_prctl(SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(
        options.command,
        folder=options.folder,
        deadline_s=options.deadline,
        stall_s=options.stall,
        grace_s=options.grace,
    )
    # The command keeps the lock too: were this process killed, the lock would last as long as the command.
    record = supervisor.run(() if options.lock_fd is None else (options.lock_fd,))
    return 0 if record.reason == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
