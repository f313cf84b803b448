"""manifest.json: the proof that a stage's folder is whole. Written last, by the flow side.

    {"stage", "key", "made_from": {...}, "source", "files": [{"name", "sha256", "size", "mtime_ns", "ctime_ns"}],
     "started", "finished" (UTC), "seconds", "world_size"}

A folder without one is unfinished; a folder whose files differ from it is not used.
"""

import hashlib
import json
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from distribute.job import read_json, write_json
from tasks.step import Step, differences

NAME = "manifest.json"
#: In a stage's folder, but no artifact: they may differ from run to run, or be gone.
NOT_ARTIFACTS = (NAME, ".*", "job.json", "exit.json", "progress-*", "error-*.json", "logs*")
#: Removed before a stage is tried again: what an earlier attempt said about itself.
CLEARED = (NAME, "job.json", "exit.json", "progress-*", "error-*.json", "result.json")
#: Kept even when everything else is removed: the lock may be held, the logs explain an earlier failure.
KEPT = (".lock", "logs*")
_CHUNK = 1 << 22


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(step: Step, *, world_size: int, started: str, finished: str, seconds: float) -> None:
    """Record every artifact in the stage's folder and make it complete."""
    write_json(
        step.folder / NAME,
        {
            "stage": step.stage,
            "key": step.key,
            "made_from": step.made_from,
            "source": step.run.source.address,
            "files": _records(step.folder),
            "started": started,
            "finished": finished,
            "seconds": round(seconds, 3),
            "world_size": world_size,
        },
    )


def find_fault(folder: Path, key: str) -> str:
    """What is wrong with a stage's folder, or "" when it is whole.

    Sizes and times are compared; a file whose time differs is read and its sha256 compared.
    """
    try:
        manifest = read_json(folder / NAME)
        if manifest["key"] != key:
            return f"{NAME} belongs to another key"
        return next(filter(None, (_file_fault(folder, record) for record in manifest["files"])), "")
    except FileNotFoundError:
        return "the last attempt did not finish"
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"{NAME} is damaged"


def explain_absence(step: Step) -> str:
    """Why there is no folder for this step: what changed since the stage last ran on this source."""
    last = _last_manifest(step)
    if last is None:
        return "first run"
    changed = differences(last["made_from"], step.made_from)
    return f"changed since the last run: {', '.join(changed[:4])}{' ...' if changed[4:] else ''}"


def clear(folder: Path, *, artifacts: bool) -> None:
    """Make a stage's folder ready for another attempt; `artifacts` says whether what was made goes too."""
    # The manifest goes last: a kill in between must not leave half of the artifacts without a word.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == NAME):
        if _is(path.name, CLEARED) or (artifacts and not _is(path.name, KEPT)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _records(folder: Path) -> list[dict[str, Any]]:
    """A record for every artifact. What export has hashed already (files.json) is not read once more."""
    known = _hashed_by_export(folder)
    records = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not _is(name.partition("/")[0], NOT_ARTIFACTS):
            stat = path.stat()
            digest = known.get((name, stat.st_size)) or sha256_of(path)
            records.append({"name": name, "sha256": digest, **_identity(stat)})
    return records


def _hashed_by_export(folder: Path) -> dict[tuple[str, int], str]:
    listing = folder / "files.json"
    if not listing.is_file():
        return {}
    return {(f"checkpoint/{file['name']}", file["size"]): file["sha256"] for file in read_json(listing)}


def _file_fault(folder: Path, record: dict[str, Any]) -> str:
    path = folder / record["name"]
    if not path.is_file():
        return f"{record['name']} is gone"
    found = _identity(path.stat())
    if found["size"] == record["size"] and (found.items() <= record.items() or sha256_of(path) == record["sha256"]):
        return ""
    return f"{record['name']} was altered"


def _identity(stat: os.stat_result) -> dict[str, int]:
    """What changes when a file is written. Nobody can set the ctime back, as tools do with the mtime."""
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def _last_manifest(step: Step) -> dict[str, Any] | None:
    """The newest readable manifest of this stage and source address in the workspace."""
    found = []
    for path in (step.run.workspace / step.stage).glob(f"*/{NAME}"):
        try:
            manifest = read_json(path)
            if manifest["source"] == step.run.source.address and manifest["made_from"]:
                found.append(manifest)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged manifest explains nothing
    return max(found, key=lambda manifest: str(manifest.get("finished")), default=None)
