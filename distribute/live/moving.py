"""A checkpoint moved file by file into the folder above it, where folders cannot be swapped. Torch-free.

A note in the staging folder says what is to be done, so that after a kill the same call finishes the move.
Index, config and stale files go first and come last: what a reader can open in between is no checkpoint.
"""

import json
import os
import shutil
from pathlib import Path

from distribute.source import INDEX_NAME
from distribute.swap import sync_folder

NOTE = ".moving"
GATES = ("config.json", INDEX_NAME)  # no loader opens a checkpoint of several files without both


def write_note(staging: Path, files: list[str], stale: list[str]) -> None:
    """Decide to move `files`, which are durable, and to remove `stale`. From here on there is no way back."""
    temporary = staging / f"{NOTE}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"files": files, "stale": stale}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(staging / NOTE)
    sync_folder(staging)


def is_moving(staging: Path) -> bool:
    """Whether a move has been decided and is not finished."""
    return (staging / NOTE).is_file()


def move_in(staging: Path, folder: Path) -> None:
    """Do, or finish, what the note says, and remove the staging folder."""
    note = json.loads((staging / NOTE).read_bytes())
    waiting = [name for name in sorted(note["files"], key=_turn) if (staging / name).is_file()]
    for name in (*(gate for gate in GATES if gate in waiting), *note["stale"]):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
    for name in waiting:
        os.replace(staging / name, folder / name)
    sync_folder(folder)
    (staging / NOTE).unlink()
    shutil.rmtree(staging, ignore_errors=True)


def _turn(name: str) -> tuple[int, bool, str]:
    return (GATES.index(name) + 1 if name in GATES else 0, not name.endswith(".safetensors"), name)
