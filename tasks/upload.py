"""The upload task: the files that verify has read and found whole go to the target. Leaves receipt.json."""

import logging
from pathlib import Path
from typing import Any

from distribute.job import read_json, write_json
from distribute.sizes import format_size
from infra.release import RECEIPT
from infra.storage import LocalFile, open_target, publish
from tasks.export import CHECKPOINT, export_step
from tasks.progress import State, tell
from tasks.run import Run
from tasks.stage import StageResult
from tasks.verify import verify_step

log = logging.getLogger(__name__)


def check_target(address: str, overwrite: bool) -> None:
    """Ask the target whether it can be written, before anything costs time.

    Raises:
        TargetError: it cannot.
    """
    log.info("target: %s", open_target(address, overwrite=overwrite).preflight())


def upload(run: Run) -> dict[str, Any]:
    """Publish the verified checkpoint of this run and return the receipt; see `infra.storage.publish`.

    Raises:
        TargetError: the target cannot be used. StageError: it holds something else than was sent.
    """
    return _publish(run, verified_files(verify_step(run).folder, export_step(run).folder / CHECKPOINT))


def upload_folder(run: Run, verified: StageResult) -> dict[str, Any]:
    """Publish the folder that `verify_folder` found sound, without the receipt of an earlier upload."""
    files = verified_files(verified.folder, run.source.folder)
    return _publish(run, [file for file in files if file.name != RECEIPT])


def verified_files(verdict: Path, checkpoint: Path) -> list[LocalFile]:
    """The files of the checkpoint with the sha256 that verify has confirmed in its stage folder `verdict`."""
    files = read_json(verdict / "verify.json")["files"]
    return [LocalFile(file["name"], checkpoint / file["name"], file["size"], file["sha256"]) for file in files]


def _publish(run: Run, files: list[LocalFile]) -> dict[str, Any]:
    assert run.target, "a run without a target has nothing to upload"
    total, done = sum(file.size for file in files), 0

    def on_progress(name: str, count: int) -> None:
        nonlocal done
        done += count
        tell(State("upload", name, done, total, "bytes"))

    receipt = publish(open_target(run.target, overwrite=run.overwrite), files, on_progress=on_progress)
    run.folder.mkdir(parents=True, exist_ok=True)
    write_json(run.folder / "receipt.json", receipt)
    log.info(
        "upload: %d files (%s), %d were there already, at %s",
        len(files),
        format_size(total),
        len(receipt["skipped"]),
        receipt["address"],
    )
    return receipt
