"""The supervisor with real processes: however it ends, nothing of its tree is left."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distribute.segments import new_name
from infra import supervisor
from tests.infra.trees import FAKE, living, segments, tree_pids, wait_for, wait_for_tree

# On SIGTERM the main thread alone ends (the system call exit, not exit_group); another thread runs on.
HEADLESS = """
import ctypes, os, pathlib, signal, sys, threading, time
number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
signal.signal(signal.SIGTERM, lambda *_: ctypes.CDLL(None).syscall(number, 0))
threading.Thread(target=time.sleep, args=(60,)).start()
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(60)
"""


def start(
    folder: Path, *options: str, fake: tuple[str, ...] = (), pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen:
    program = [sys.executable, "-I", "-S", supervisor.__file__, "--folder", str(folder), *options, "--"]
    command = [sys.executable, "-I", "-S", str(FAKE), str(folder), *fake]
    return subprocess.Popen([*program, *command], stdin=subprocess.PIPE, start_new_session=True, pass_fds=pass_fds)


def finish(process: subprocess.Popen, folder: Path, pids: set[int], *, seconds: float = 10) -> dict:
    """Wait for the supervisor, check that nothing is left, return exit.json."""
    process.wait(seconds)
    process.stdin.close()
    assert living(pids) == set()
    assert segments(pids) == []
    return json.loads((folder / "exit.json").read_text())


def children(parent: int) -> set[int]:
    return {pid for pid, process in supervisor.processes().items() if process.parent == parent}


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted"), (signal.SIGHUP, "terminated")],
)
def test_signal_ends_tree(tmp_path, number, reason):
    process = start(tmp_path)
    pids = wait_for_tree(tmp_path)
    assert len(segments(pids)) == 2
    process.send_signal(number)
    record = finish(process, tmp_path, pids)
    assert record["reason"] == reason
    assert record["exit_code"] == -signal.SIGTERM
    assert record["leftovers_killed"] == 0
    assert record["segments_removed"] >= 2
    assert process.returncode == 1


def test_deaf_ranks_are_killed_within_ten_seconds(tmp_path):
    process = start(tmp_path, fake=("--deaf",))
    pids = wait_for_tree(tmp_path)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    record = finish(process, tmp_path, pids)  # the default grace
    assert time.monotonic() - began < 9
    assert record["leftovers_killed"] == 4


def test_threads_that_outlive_their_main_thread_are_ended(tmp_path):
    pids_folder = tmp_path / "pids"
    pids_folder.mkdir()
    program = [sys.executable, supervisor.__file__, "--folder", str(tmp_path), "--grace", "2", "--"]
    command = [sys.executable, "-c", HEADLESS, str(pids_folder)]
    process = subprocess.Popen([*program, *command], stdin=subprocess.PIPE)
    assert wait_for(lambda: any(pids_folder.iterdir()))
    (pid,) = tree_pids(tmp_path)
    boot, space = new_name().split("-")[1:3]
    segment = Path(f"/dev/shm/nogather-{boot}-{space}-{pid}-{supervisor.processes()[pid].start}-x")
    segment.touch()
    process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: supervisor.processes()[pid].state == "Z", seconds=5)
    assert supervisor.processes()[pid].lives
    record = finish(process, tmp_path, {pid})
    assert (record["reason"], record["exit_code"]) == ("terminated", -signal.SIGKILL)
    assert record["leftovers_killed"] == 1
    assert not Path(f"/proc/{pid}").exists()
    assert not segment.exists()


@pytest.mark.parametrize(
    ("defect", "reason"),
    [("_wait = lambda *_: time.sleep(1) / 0", "failed"), ("_reap = lambda self: None", "deadline")],
)
def test_defect_of_the_supervisor_still_ends_tree_and_is_told(tmp_path, defect, reason):
    code = (
        "import sys, time\nfrom infra import supervisor\n"
        f"supervisor.REAP_S = 0.5\nsupervisor.Supervisor.{defect}\n"
        "sys.exit(supervisor.main(sys.argv[1:]))\n"
    )
    options = ["--folder", str(tmp_path), "--grace", "0.5", "--deadline", "1", "--"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options, "sleep", "60"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert wait_for(lambda: children(process.pid))
    pids = children(process.pid)
    assert process.wait(20) == 1
    process.stdin.close()
    assert living(pids) == set()
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record["reason"] == reason
    assert record["ended"] >= record["started"]


def test_end_of_stdin_ends_tree(tmp_path):
    process = start(tmp_path, "--grace", "0.3", fake=("--deaf",))
    pids = wait_for_tree(tmp_path)
    process.stdin.close()
    assert finish(process, tmp_path, pids)["reason"] == "parent_gone"


def test_killed_parent_ends_tree_although_stdin_stays_open(tmp_path):
    read, write = os.pipe()
    code = (
        "import subprocess, sys, time\n"
        "process = subprocess.Popen(sys.argv[2:], stdin=int(sys.argv[1]))\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    program = [sys.executable, "-I", "-S", supervisor.__file__, "--folder", str(tmp_path), "--"]
    command = [sys.executable, "-I", "-S", str(FAKE), str(tmp_path)]
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(read), *program, *command], pass_fds=(read,), stdout=subprocess.PIPE
    )
    pids = wait_for_tree(tmp_path) | {int(parent.stdout.readline())}
    parent.kill()
    parent.wait()
    assert wait_for(lambda: not living(pids), seconds=10)
    assert segments(pids) == []
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "parent_gone"
    os.close(write)
    os.close(read)
    parent.stdout.close()


def test_deadline_ends_tree(tmp_path):
    process = start(tmp_path, "--deadline", "3", "--grace", "0.3", fake=("--deaf",))
    record = finish(process, tmp_path, wait_for_tree(tmp_path))
    assert record["reason"] == "deadline"
    assert record["seconds"] >= 3


def test_stall_ends_tree_only_when_progress_stops(tmp_path):
    process = start(tmp_path, "--stall", "2")
    pids = wait_for_tree(tmp_path)
    for step in range(8):
        time.sleep(0.5)
        (tmp_path / "progress-0.json").write_text(str(step))
    assert process.poll() is None
    record = finish(process, tmp_path, pids)
    assert record["reason"] == "stalled"
    assert record["seconds"] >= 6


@pytest.mark.parametrize("flags", [("--daemon",), ("--code", "3")])
def test_ranks_left_behind_by_launcher_are_ended(tmp_path, flags):
    process = start(tmp_path, "--grace", "0.3", fake=("--deaf", *flags))
    record = finish(process, tmp_path, wait_for_tree(tmp_path))
    assert record["reason"] == ("finished" if flags == ("--daemon",) else "failed")
    assert record["exit_code"] == int((*flags, "0")[1])
    assert record["leftovers_killed"] == 4
    assert process.returncode == (0 if record["reason"] == "finished" else 1)


def test_killed_launcher_is_a_failure(tmp_path):
    process = start(tmp_path)
    pids = wait_for_tree(tmp_path)
    os.kill(children(process.pid).pop(), signal.SIGKILL)
    record = finish(process, tmp_path, pids)
    assert (record["reason"], record["exit_code"]) == ("failed", -signal.SIGKILL)


def test_killed_supervisor_takes_launcher_along(tmp_path):
    process = start(tmp_path)
    pids = wait_for_tree(tmp_path)
    launcher = children(process.pid)
    process.kill()
    process.wait()
    process.stdin.close()
    assert wait_for(lambda: not living(launcher), seconds=5)
    for pid in living(pids):  # the fake launcher, unlike torchrun, does not tell its ranks
        os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not living(pids))
    assert len(segments(pids)) == 2
    supervisor.remove_segments([Path("/dev/shm")])
    assert segments(pids) == []


def test_missing_program_is_told(tmp_path):
    program = [sys.executable, supervisor.__file__, "--folder", str(tmp_path), "--", "/no/such/program"]
    done = subprocess.run(program, input="", stderr=subprocess.PIPE, text=True, check=False)
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (done.returncode, record["reason"], record["exit_code"]) == (1, "not_started", None)
    assert "/no/such/program" in done.stderr


def test_runs_as_module(tmp_path):
    program = [sys.executable, "-m", "infra.supervisor", "--folder", str(tmp_path), "--", "/bin/sh", "-c", "exit 0"]
    process = subprocess.Popen(program, stdin=subprocess.PIPE)
    assert process.wait(10) == 0
    process.stdin.close()
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "finished"


def test_lock_lasts_until_tree_is_gone(tmp_path):
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    options = ("--lock-fd", str(lock), "--grace", "1.5")
    process = start(tmp_path, *options, fake=("--deaf",), pass_fds=(lock,))
    pids = wait_for_tree(tmp_path)
    os.close(lock)
    process.stdin.close()
    other = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX)  # waits
    assert living(pids) == set()
    assert finish(process, tmp_path, pids)["reason"] == "parent_gone"
    os.close(other)


def test_only_segments_of_dead_makers_of_this_boot_and_namespace_go(tmp_path):
    boot, space, pid, start = new_name().split("-")[1:5]
    stay = [
        f"nogather-{boot}-{space}-{pid}-{start}-x",  # we live
        f"nogather-00000000-{space}-999999999-1-x",
        f"nogather-{boot}-1-999999999-1-x",
        "nogather-mine",
        f"other-{boot}-{space}-999999999-1-x",
    ]
    go = [
        f"nogather-{boot}-{space}-999999999-1-x",
        f"nogather-{boot}-{space}-{pid}-{int(start) + 1}-x",  # our pid, but of another process
    ]
    for name in (*stay, *go):
        (tmp_path / name).touch()
    assert supervisor.remove_segments([tmp_path]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stay)


def test_first_failure_is_the_earliest(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for rank, text, moment in [(0, "1\n", 30), (1, "139\n", 20), (2, "0\n", 10), (3, "", 5)]:
        (logs / f"rank-{rank}.exit").write_text(text)
        os.utime(logs / f"rank-{rank}.exit", (moment, moment))
    assert supervisor.first_failure(tmp_path) == {"rank": 1, "exit_code": -11, "time": 20.0}


def test_descendants_are_found_through_every_level(tmp_path):
    process = start(tmp_path)
    pids = wait_for_tree(tmp_path)
    assert supervisor.descendants(process.pid) == pids
    process.stdin.close()
    finish(process, tmp_path, pids)
