"""The user's own files of an export folder, carried into the folder that takes its place. Torch-free.

Files are hard-linked, so that nothing is read and a program that has one open goes on writing the same file; where
links are not possible they are copied. Weights and records of an older export are not the user's.
"""

import json
import os
import shutil
import stat
from collections.abc import Container
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from distribute.source import INDEX_NAME
from distribute.swap import sync_folder

#: What an older export leaves and a new one may not write again. Weights that an old index names come on top.
OLD_FILES = ("model.safetensors", "model-*.safetensors", INDEX_NAME, "hf_quant_config.json", "SHA256SUMS")


def old_files(folder: Path) -> set[str]:
    """Names in `folder` that belong to an older export."""
    if not folder.is_dir():
        return set()
    names = {entry.name for entry in os.scandir(folder) if entry.is_symlink() or not entry.is_dir()}
    named = {name for name in _weights_of_index(folder / INDEX_NAME) if fnmatch(name, "*.safetensors")}
    matching = {name for name in names if any(fnmatch(name, pattern) for pattern in OLD_FILES)}
    return (names & named) | matching


def carry_over(source: Path, target: Path, leave: Container[str] = ()) -> None:
    """Link or copy what is in `source` and not in `target`, subfolders and modes included, and make it durable.

    Args:
        leave: names at the top that stay behind.

    Raises:
        OSError: a file can neither be linked nor copied.
    """
    with os.scandir(source) as entries:
        for entry in entries:
            place = target / entry.name
            if entry.name in leave:
                continue
            with suppress(FileNotFoundError):  # the user has just removed it
                if entry.is_dir(follow_symlinks=False):
                    _carry_folder(Path(entry.path), place)
                elif not os.path.lexists(place):
                    _carry_file(Path(entry.path), place)
    sync_folder(target)


def _carry_folder(source: Path, place: Path) -> None:
    if os.path.lexists(place) and not place.is_dir():
        return
    place.mkdir(exist_ok=True)
    carry_over(source, place)
    shutil.copystat(source, place)


def _carry_file(source: Path, place: Path) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # no links here, or not to files of others
        mode = source.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise
        shutil.copy2(source, place, follow_symlinks=False)
        if stat.S_ISREG(mode):
            with place.open("rb") as file:
                os.fsync(file.fileno())


def _weights_of_index(path: Path) -> set[str]:
    """The files that an index names; none when it is not there or not an index."""
    try:
        names = json.loads(path.read_bytes())["weight_map"].values()
        return {name for name in names if isinstance(name, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
