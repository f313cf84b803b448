import logging

import pytest

from flows.display import shown
from tasks.progress import State, tell


def states() -> list[State]:
    steps = [State("export", "export", done, 4000, "bytes") for done in range(0, 4001, 1000)]
    return [*steps, State("calibrate", "scan weights", 1, 2, "tensors")]


def test_in_a_pipe_progress_is_a_few_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(bars=False):
        for state in states():
            tell(state)
        logging.getLogger("tasks.stage").info("export: reused")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.partition(" ")[2] for line in captured.err.splitlines()] == [
        "export: 0 B of 4 kB",
        "export: 4 kB of 4 kB",
        "calibrate: scan weights: 1 of 2 tensors",
        "export: reused",
    ]


def test_on_a_terminal_there_is_a_bar_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(bars=True):
        for state in states():
            tell(state)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "100%" in captured.err
    assert "calibrate: scan weights" in captured.err


def test_afterwards_nobody_listens_and_loggers_are_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("tasks")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with shown(bars=False):
        pass
    tell(states()[0])
    assert (logger.level, logger.propagate, logger.handlers) == before
    assert capsys.readouterr().err == ""


def test_secrets_are_hidden_in_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(bars=False):
        logging.getLogger("infra.s3").info("%s", "s3://KEY:SECRET@bucket")
    assert capsys.readouterr().err.endswith("s3://***@bucket\n")
