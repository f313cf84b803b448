"""Runs one stage: reuse what is whole, else write the job, start the ranks, follow them and seal the result.

Owns the stage's folder on the workspace while it holds the lock. Knows nothing about what a stage computes,
and does not import torch or Prefect. See step.py for the key and manifest.py for what makes a folder whole.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from distribute.errors import LaunchError, WorkspaceError
from distribute.job import Job, read_json
from infra.launch import RankCommand, run_ranks
from infra.settings import Settings, load_settings
from tasks.manifest import NAME, clear, explain_absence, find_fault, write_manifest
from tasks.progress import read_state, tell
from tasks.step import Step

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.5


@dataclass(frozen=True)
class StageResult:
    """What a stage left. `seconds` is the time of the attempt that made it, also when it is reused now."""

    stage: str
    key: str
    folder: Path
    reused: bool
    reason: str
    seconds: float
    peak_memory_bytes: tuple[int, ...]  # one a rank
    figures: dict[str, Any]


def run_step(
    step: Step, *, job_options: dict[str, Any] | None = None, worker: str = "distribute.worker"
) -> StageResult:
    """Make the stage's artifacts, or find them whole.

    Args:
        step: what to make.
        job_options: options that decide no byte (paths of files whose digest is in the key).
        worker: module that the ranks run.

    Raises:
        UserError, StageError: what the first failing rank raised; LaunchError when ranks could not run.
        WorkspaceError: the folder cannot be used, or another run is working in it.
    """
    settings = load_settings()
    _make_folder(step.folder)
    with _locked(step, settings) as lock_fd:
        fault = find_fault(step.folder, step.key)
        if not fault:
            log.info("%s: reused (key %s)", step.stage, step.key)
            return _result(step, reused=True, reason=f"key {step.key}")
        reason = _explain(step, fault)
        log.info("%s: building, %s (key %s)", step.stage, reason, step.key)
        clear(step.folder, artifacts=(step.folder / NAME).exists())
        _build(step, settings, lock_fd, job_options=job_options or {}, worker=worker)
        return _result(step, reused=False, reason=reason)


def _build(step: Step, settings: Settings, lock_fd: int, *, job_options: dict[str, Any], worker: str) -> None:
    started, clock = _now(), time.monotonic()
    job = Job(
        stage=step.stage,
        source=str(step.run.source.folder),
        folder=str(step.folder),
        recipe=step.run.recipe.model_dump(mode="json"),
        inputs={name: str(upstream.folder) for name, upstream in step.inputs.items()},
        options={**step.options, **job_options},
        run_id=step.run.run_id,
    )
    command = RankCommand(args=("-m", worker, str(job.write())), folder=step.folder, nproc=step.run.nproc)
    run_ranks(
        command,
        deadline_s=settings.stage_limit_s,
        stall_s=settings.stall_limit_s,
        on_line=lambda rank, text: log.info("[%s rank %d] %s", step.stage, rank, text),
        on_tick=_progress_teller(step),
        lock_fd=lock_fd,
    )
    if not (step.folder / "result.json").is_file():
        raise LaunchError(f"{step.stage} ended without a result; its logs are in {step.folder / 'logs'}")
    write_manifest(
        step,
        world_size=step.run.nproc,
        started=started,
        finished=_now(),
        seconds=time.monotonic() - clock,
    )


def _progress_teller(step: Step) -> Callable[[], None]:
    last = None

    def on_tick() -> None:
        nonlocal last
        state = read_state(step.stage, step.folder)
        if state and state != last:
            last = state
            tell(state)

    return on_tick


def _result(step: Step, *, reused: bool, reason: str) -> StageResult:
    result, manifest = read_json(step.folder / "result.json"), read_json(step.folder / NAME)
    for text in result["figures"].get("warnings", []):
        warn_once(step.run.run_id, text)
    return StageResult(
        stage=step.stage,
        key=step.key,
        folder=step.folder,
        reused=reused,
        reason=reason,
        seconds=manifest["seconds"],
        peak_memory_bytes=tuple(result["peak_memory_bytes"]),
        figures=result["figures"],
    )


@cache  # once a run: the preflight and every stage hand warnings on
def warn_once(run_id: str, text: str) -> None:
    """Show a warning to the person, unless this run has done so already."""
    log.warning("warning: %s", text)


def _explain(step: Step, fault: str) -> str:
    """Why the stage is built: what is wrong with its folder, or what changed when there was none."""
    if step.is_fresh:
        return "never reused"
    was_tried = any(not path.name.startswith(".") for path in step.folder.iterdir())
    return fault if was_tried else explain_absence(step)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkspaceError(
            f"{folder} cannot be made ({error.strerror}); choose another folder with --workspace"
        ) from None


@contextmanager
def _locked(step: Step, settings: Settings) -> Iterator[int]:
    """Hold the stage's folder. The ranks' supervisor inherits the lock, so that it outlives a killed flow process."""
    path = step.folder / ".lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _acquire(fd, path, step.stage, settings.lock_wait_s)
        yield fd
    finally:
        os.close(fd)  # not LOCK_UN: that would also free what the supervisor holds


def _acquire(fd: int, path: Path, stage: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    waiting = False
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        if time.monotonic() >= end:
            raise WorkspaceError(
                f"another run has been working at {stage} in {path.parent} for {limit_s:g} s; "
                "wait for it, or choose another folder with --workspace"
            )
        if not waiting:
            log.info("%s: waiting for another run that works in %s", stage, path.parent)
            waiting = True
        time.sleep(LOCK_POLL_S)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
