"""Everything that can be known before the first rank starts: a faulty run ends in seconds, not after hours."""

import logging
import os
import shutil
from pathlib import Path

from distribute.auto import inquire, largest
from distribute.errors import TargetError, WorkspaceError
from distribute.plan import Plan, make_plan
from distribute.sizes import format_size
from distribute.source import Checkpoint
from infra.folder import FolderTarget
from infra.storage import open_target
from tasks.calibrate import calibrate_step
from tasks.export import export_step
from tasks.run import Run
from tasks.stage import warn_once

log = logging.getLogger(__name__)

SPARE = 1.02  # statistics, plan, logs and side files beside the weights
SPARE_BYTES = 64 * 10**6


def check_workspace(workspace: Path) -> Path:
    """Make the workspace and return it as an absolute path.

    Raises:
        WorkspaceError: it cannot be made or written.
    """
    workspace = workspace.expanduser().absolute()
    try:
        workspace.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkspaceError(
            f"workspace {workspace} cannot be made ({error.strerror}); choose another with --workspace"
        ) from None
    if not os.access(workspace, os.W_OK | os.X_OK):
        raise WorkspaceError(f"workspace {workspace} cannot be written; choose another with --workspace")
    return workspace


def check_run(run: Run) -> None:
    """Plan the checkpoint without weights and see whether it fits on the disk.

    Raises:
        WorkspaceError, TargetError: a folder lies where it would do harm; see `check_places`.
        SourceError, RecipeError: the source cannot be quantized in this way.
        DataError: text is needed and missing.
        WorkspaceError: there is not enough room.
    """
    check_places(run)
    plan = plan_run(run)
    calibrate_step(run)
    check_space(export_step(run).folder, plan.nbytes)
    for warning in plan.warnings:
        warn_once(run.run_id, warning)
    log.info(
        "plan: %d of %d modules are quantized, %s become %s in %d files",
        len(plan.quantized),
        len(plan.decisions),
        format_size(plan.source_bytes),
        format_size(plan.nbytes),
        len(plan.files),
    )


def check_places(run: Run) -> None:
    """Keep what is written out of the source: it would replace the source, or be exported as a part of it.

    Raises:
        WorkspaceError: the workspace lies in the source folder.
        TargetError: a local target is, holds or lies in the source folder.
    """
    source = run.source.folder.resolve()
    if run.workspace.resolve().is_relative_to(source):
        raise WorkspaceError(
            f"workspace {run.workspace} lies in the source {source}, so its files would become part of the "
            "checkpoint; choose another with --workspace"
        )
    target = open_target(run.target, overwrite=run.overwrite) if run.target else None
    if isinstance(target, FolderTarget) and (
        target.folder.is_relative_to(source) or source.is_relative_to(target.folder)
    ):
        raise TargetError(f"target {target.folder} would overwrite the source {source}; choose another folder")


def plan_run(run: Run) -> Plan:
    """The plan that the quantize stage will make, from headers alone; of a budget, one that is as large."""
    checkpoint = Checkpoint.open(run.source.folder)
    recipe = largest(inquire(checkpoint, run.recipe)) if run.recipe.auto else run.recipe
    return make_plan(checkpoint, recipe, run.max_shard_bytes)


def check_space(folder: Path, checkpoint_bytes: int) -> None:
    """Raise WorkspaceError when the checkpoint does not fit beside what an earlier attempt left of it."""
    existing = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    needed = int(checkpoint_bytes * SPARE) + SPARE_BYTES - existing
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise WorkspaceError(
            f"{parent} has {format_size(free)} free but {format_size(needed)} are needed; "
            "make room, or choose another folder with --workspace"
        )
