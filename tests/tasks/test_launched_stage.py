"""A stage under the real torchrun and supervisor, with the fake worker."""

import logging
from collections.abc import Callable

import pytest

from distribute.errors import DataError, LaunchError
from tasks.calibrate import calibrate_step
from tasks.run import Run
from tasks.stage import run_step
from tests.tasks.conftest import WORKER

MakeRun = Callable[..., Run]
pytestmark = pytest.mark.usefixtures("worker_path")


def test_lines_of_ranks_come_with_their_rank_and_are_limited(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "noisy")
    caplog.set_level(logging.INFO)
    step = calibrate_step(make_run())
    assert not run_step(step, worker=WORKER).reused
    lines = [record.getMessage() for record in caplog.records]
    assert {"[calibrate rank 0] rank 0 works", "[calibrate rank 1] rank 1 works"} <= set(lines)
    assert len(lines) <= 500
    assert max(map(len, lines)) < 3000
    for rank in range(2):
        assert (step.folder / f"logs/rank-{rank}.log").read_bytes().count(b"flood\n") == 20_000


def test_a_users_mistake_comes_back_as_its_own_error(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "user")
    with pytest.raises(DataError, match=r"^the text is empty$"):
        run_step(calibrate_step(make_run()), worker=WORKER)


def test_a_crash_names_rank_cause_and_log(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "internal")
    step = calibrate_step(make_run())
    with pytest.raises(
        LaunchError, match=r"rank \d failed: ZeroDivisionError: division by zero; full log: "
    ) as raised:
        run_step(step, worker=WORKER)
    assert str(step.folder / "logs" / "rank-") in str(raised.value)
