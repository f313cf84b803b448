"""Children of a killed process end; those of a process that ends by itself are left alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.supervisor import processes

PARENT = """
import subprocess, sys, time
from infra.guard import guarded
with guarded():
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def child() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    table = processes()
    return pid in table and table[pid].lives


def begin(seconds: float, pids: list[int]) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-P", "-c", PARENT, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pids.append(int(process.stdout.readline()))
    process.stdout.close()
    return process


def test_a_child_ends_with_its_killed_parent(child: list[int]) -> None:
    process = begin(600, child)
    time.sleep(4)  # the guard looks once a second
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while lives(child[0]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not lives(child[0])


def test_a_parent_that_ends_by_itself_decides_about_its_children(child: list[int]) -> None:
    process = begin(2, child)
    assert process.wait(30) == 0
    time.sleep(1)
    assert lives(child[0])


def test_a_package_in_the_current_folder_is_not_run(
    child: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "infra").mkdir()
    (tmp_path / "infra" / "__init__.py").write_text("open('was-run', 'w')")
    (tmp_path / "infra" / "guard.py").touch()
    monkeypatch.chdir(tmp_path)
    process = begin(2, child)
    assert process.wait(30) == 0  # it waits for the guard
    assert not (tmp_path / "was-run").exists()
