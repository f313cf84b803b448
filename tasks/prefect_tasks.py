"""The stage functions as Prefect tasks. The only file of `tasks` that imports Prefect (3 s; scripts do without).

Prefect's own cache stays off: a hit there returns a stored reference without a look at the files behind it,
so our keys and manifests decide. Only what talks to a network is tried again, and never after a user's mistake.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, cast
from uuid import UUID

from prefect import Task, task
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging.handlers import APILogHandler

from distribute.errors import UserError
from infra.redact import SecretFilter
from tasks.calibrate import calibrate
from tasks.export import export
from tasks.fetch import fetch_data, fetch_source
from tasks.preflight import check_run, check_workspace
from tasks.progress import State as Progress
from tasks.progress import listening, tell
from tasks.quantize import quantize
from tasks.report import Report, report
from tasks.sensitivity import sensitivity
from tasks.upload import check_target, upload, upload_folder
from tasks.verify import verify, verify_folder

log = logging.getLogger(__name__)

LOGGERS = ("tasks", "infra", "flows")
RETRIES = 2
RETRY_DELAY_S = 10
PROGRESS_INTERVAL_S = 5.0


def may_pass(_: Task[..., Any], __: TaskRun, state: State[Any]) -> bool:
    """Whether another attempt can help: never when the user has to change something."""
    try:
        state.result()
    except UserError as error:
        log.error("%s", error)  # Prefect itself says nothing when no retry follows
        return False
    except Exception as error:
        log.warning("will be tried again: %s", error)
        return True
    return False


def _local(function: Callable[..., Any]) -> Task[..., Any]:
    return task(name=function.__name__, cache_policy=NO_CACHE, persist_result=False)(function)


def _network(function: Callable[..., Any]) -> Task[..., Any]:
    return _local(function).with_options(
        retries=RETRIES, retry_delay_seconds=RETRY_DELAY_S, retry_condition_fn=may_pass
    )


#: The Prefect task of each function. Call them, never submit them: a stage must own the main thread, so that
#: a cancel reaches it and ends its ranks.
TASKS: dict[Callable[..., Any], Task[..., Any]] = {
    **{function: _network(function) for function in (check_target, fetch_source, fetch_data, upload, upload_folder)},
    **{
        function: _local(function)
        for function in (
            check_workspace,
            check_run,
            sensitivity,
            calibrate,
            quantize,
            export,
            verify,
            verify_folder,
            report,
        )
    },
}


def call_task(function: Callable[..., Any], *args: Any) -> Any:
    """Run a stage function as its Prefect task, in this thread."""
    return TASKS[function](*args)


@contextmanager
def logs_to_prefect() -> Iterator[None]:
    """Send our log lines and progress to the current run. Lines of ranks are limited before (infra.follow)."""
    handler = APILogHandler(level=logging.INFO)
    handler.addFilter(SecretFilter())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        with _progress_to_prefect():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


class ProgressBar:
    """One progress artifact of the current run, written by a thread of its own: a server that hangs stops no rank."""

    def __init__(self) -> None:
        self._latest: Progress | None = None
        self._shown: Progress | None = None
        self._artifact: UUID | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._follow,), daemon=True)
        self._thread.start()

    def update(self, progress: Progress) -> None:
        """Note how far a stage is; the thread shows the latest."""
        self._latest = progress

    def close(self) -> None:
        """Show the latest once more, unless the server takes too long."""
        self._closed.set()
        self._thread.join(PROGRESS_INTERVAL_S)

    def _follow(self) -> None:
        while not self._closed.wait(PROGRESS_INTERVAL_S):
            self._show()
        self._show()

    def _show(self) -> None:
        latest = self._latest
        if latest is None or latest == self._shown:
            return
        percent = 100 * latest.done / max(1, latest.total)
        text = f"{latest.stage}: {latest.label}, {latest.done} of {latest.total} {latest.unit}"
        try:
            if self._artifact is None:
                self._artifact = cast(UUID, create_progress_artifact(percent, key="progress", description=text))
            else:
                update_progress_artifact(self._artifact, percent, description=text)
            self._shown = latest
        except Exception as error:  # whatever the client raises; the next turn tries again
            log.debug("progress could not be shown in the UI: %s", error)


@contextmanager
def _progress_to_prefect() -> Iterator[None]:
    outside = copy_context()  # its listener, the command line's, is told as before
    bar = ProgressBar()

    def listener(progress: Progress) -> None:
        outside.run(tell, progress)
        bar.update(progress)

    try:
        with listening(listener):
            yield
    finally:
        bar.close()


def show_report(made: Report) -> None:
    """Show the report in the UI. It is on disk already, so a server that fails here fails nothing."""
    key = artifact_key(f"{made.summary['model']} {made.summary['recipe']['preset']}")
    try:
        create_markdown_artifact(made.markdown, key=f"report-{key}", description="what was quantized and how well")
        create_table_artifact(made.worst, key=f"worst-tensors-{key}", description="tensors with the lowest SQNR")
    except Exception as error:  # whatever the client raises
        log.warning("the report is in %s, but could not be shown in the UI: %s", made.folder, error)


def artifact_key(text: str) -> str:
    """Lowercase letters, digits and dashes: all that Prefect takes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[-80:].strip("-")
