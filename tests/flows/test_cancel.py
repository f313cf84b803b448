"""Whatever ends the flow process ends its ranks, its server and their shared memory, and the run can go on.

Counted, not assumed: every descendant is noted before, and looked for afterwards.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from infra.supervisor import SEGMENT, descendants, processes
from tests.models import SENTENCES

LIMIT_S = 30.0  # 10 s on an idle machine, which a test cannot expect
START_LIMIT_S = 150.0

Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Start]:
    """Starts a run whose calibration takes far longer than the test."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(SENTENCES * 6000))
    started: list[subprocess.Popen] = []
    workspace = ["--workspace", str(tmp_path / "workspace"), "--nproc", "2"]
    amount = ["--calib", str(text), "--samples", "4000", "--seq-len", "250", "--batch-size", "1"]

    def begin(*options: str) -> subprocess.Popen:
        model = str(tiny_model("llama", layers=24, hidden=128))
        command = [
            sys.executable,
            "-c",
            "from flows.cli import main; main()",
            "run",
            model,
            *amount,
            *workspace,
            *options,
        ]
        with (tmp_path / f"run-{len(started)}.log").open("w") as log:
            # A job in the background of a shell ignores SIGINT, and so would what it starts.
            restore = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
            started.append(subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=restore))
        _wait_for_ranks(started[-1], tmp_path)
        return started[-1]

    yield begin
    for process in started:
        left = descendants(process.pid)
        process.kill()
        process.wait()
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def _wait_for_ranks(process: subprocess.Popen, folder: Path) -> None:
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        paths = folder.glob("workspace/calibrate/*/progress-*.json")
        if (
            len(ranks(descendants(process.pid))) >= 2
            and sum("calibrating" in path.read_text() for path in paths) == 2
        ):
            return
        assert process.poll() is None, (folder / "run-0.log").read_text()
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def ranks(pids: set[int]) -> set[int]:
    """Those of `pids` that run the worker."""
    return {pid for pid in pids if b"distribute.worker" in command_line(pid)}


def command_line(pid: int) -> bytes:
    with suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def segments(tree: dict[int, int]) -> set[str]:
    """Shared-memory names that a process of `tree` has made."""
    found = map(SEGMENT.fullmatch, os.listdir("/dev/shm"))
    return {match[0] for match in found if match and int(match[3]) in tree}


def left_after(tree: dict[int, int], limit_s: float) -> set[int]:
    """pids of `tree` (pid -> start time) that still live after `limit_s` at most."""
    end = time.monotonic() + limit_s
    while True:
        table = processes()
        alive = {
            pid for pid, begun in tree.items() if pid in table and table[pid].lives and table[pid].start == begun
        }
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.1)


def end_and_count(process: subprocess.Popen, number: int) -> int:
    """Send a signal, check that nothing is left of the tree, and return the exit code."""
    table = processes()
    tree = {pid: table[pid].start for pid in descendants(process.pid) if pid in table}
    assert len(ranks(set(tree))) >= 2
    process.send_signal(number)
    left = left_after(tree, LIMIT_S)
    assert not left, [command_line(pid) for pid in left]
    assert not segments(tree)
    return process.wait(30)


def test_the_ranks_end_with_the_flow_process_and_the_next_run_starts_at_once(start: Start) -> None:
    assert end_and_count(start("--direct"), signal.SIGKILL) == -signal.SIGKILL
    assert end_and_count(start("--direct"), signal.SIGTERM) == 143


def test_a_stage_that_outruns_its_limit_is_ended_and_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NOGATHER_STAGE_LIMIT_S", "20")
    process = start("--direct")
    table = processes()
    tree = {pid: table[pid].start for pid in descendants(process.pid) if pid in table}
    assert len(ranks(set(tree))) >= 2
    assert process.wait(60) == 1
    assert not left_after(tree, 0) and not segments(tree)
    (record,) = tmp_path.glob("workspace/calibrate/*/exit.json")
    assert json.loads(record.read_text())["reason"] == "deadline"
    assert "limit" in (tmp_path / "run-0.log").read_text().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_under_prefect_the_embedded_server_ends_too(start: Start, number: int, code: int) -> None:
    assert end_and_count(start(), number) == code
