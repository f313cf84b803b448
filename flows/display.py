"""What a person sees while a run goes on: bars on a terminal, a line now and then in a pipe. All on stderr."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from distribute.sizes import format_size
from infra.redact import SecretFilter
from tasks.progress import State, listening

PROGRESS = "progress"  # lines for this terminal alone: tasks.prefect_tasks sends the other loggers to the server
LOGGERS = ("tasks", "infra", "flows", PROGRESS)
LINE_INTERVAL_S = 10.0


class Bars:
    """One bar for each step of each stage."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._bars: dict[tuple[str, str], TaskID] = {}

    def __call__(self, state: State) -> None:
        # The files of an upload share one bar.
        step = (state.stage, state.label if state.unit != "bytes" or state.stage != "upload" else "")
        if step not in self._bars:
            self._bars[step] = self._progress.add_task(_title(state), total=state.total, amount="")
        self._progress.update(
            self._bars[step],
            completed=state.done,
            total=state.total,
            amount=_amount(state),
            description=_title(state),
        )


class Lines:
    """A line when a step begins or ends, and every ten seconds in between."""

    def __init__(self) -> None:
        self._step = ""
        self._last = 0.0

    def __call__(self, state: State) -> None:
        step = f"{state.stage} {state.label}" if state.stage != "upload" else state.stage
        is_due = step != self._step or state.done >= state.total or time.monotonic() - self._last > LINE_INTERVAL_S
        if is_due:
            self._step, self._last = step, time.monotonic()
            logging.getLogger(PROGRESS).info("%s: %s", _title(state), _amount(state))


@contextmanager
def shown(*, bars: bool | None = None) -> Iterator[None]:
    """Show log lines and progress of everything that runs inside; `bars` None means: on a terminal."""
    console = Console(stderr=True)
    if bars if bars is not None else console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[amount]}"),
        )
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            handler = RichHandler(console=console, show_path=False, show_level=False, markup=False, highlighter=None)
            with _logging_to(handler), listening(Bars(progress)):
                yield
    else:
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        with _logging_to(stream), listening(Lines()):
            yield


@contextmanager
def _logging_to(handler: logging.Handler) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    handler.addFilter(SecretFilter())
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # Prefect's root handler would show each line again
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def _title(state: State) -> str:
    same = state.label in (state.stage, "")
    return state.stage if same else f"{state.stage}: {state.label}"


def _amount(state: State) -> str:
    if state.unit == "bytes":
        return f"{format_size(state.done)} of {format_size(state.total)}"
    return f"{state.done} of {state.total} {state.unit}"
