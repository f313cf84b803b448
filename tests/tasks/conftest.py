"""Runs of a made-up source, and ranks that start in 50 ms: plain processes instead of torchrun."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distribute.errors import LaunchError
from distribute.recipe import make_recipe
from infra.failure import as_error, first_failure, read_failures
from infra.launch import RankCommand
from tasks.run import DataFile, Run, Source

ROOT = Path(__file__).parents[2]
WORKER = "tests.tasks.fake_worker"


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    def make(**changes: Any) -> Run:
        recipe = make_recipe(changes.pop("recipe", {"preset": "fp8"}))
        values: dict[str, Any] = {
            "run_id": "test",
            "workspace": tmp_path / "workspace",
            "source": Source("org/model", tmp_path / "source", "a" * 64),
            "data": DataFile("text.txt", tmp_path / "text.txt", "b" * 64),
            "nproc": 2,
        }
        return Run(recipe=recipe, **(values | changes))

    return make


@pytest.fixture
def worker_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks import `tests`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NOGATHER_LOCK_WAIT_S", "0.2")


@pytest.fixture
def plain_ranks(monkeypatch: pytest.MonkeyPatch, worker_path: None) -> None:
    """`run_ranks` without torchrun and supervisor; those have their own tests."""

    def run_ranks(command: RankCommand, *, on_tick: Callable[[], None], **_: Any) -> None:
        for rank in range(command.nproc):
            argv = [sys.executable, *command.args]
            subprocess.run(argv, env=os.environ | {"RANK": str(rank)}, stdout=subprocess.DEVNULL, check=False)
        on_tick()
        if failure := first_failure(read_failures(command.folder)):
            raise as_error(failure, command.log(failure.rank))
        if not (command.folder / "result.json").exists():
            raise LaunchError("rank 0 failed: killed by SIGKILL")

    monkeypatch.setattr("tasks.stage.run_ranks", run_ranks)
