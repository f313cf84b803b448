"""A local folder as target: copy into a sibling, check it, then swap the folders in one step.

The sibling `.<name>.nogather-partial` is on the same file system, so the swap is a rename. A reader sees the
older export or the new one, never a mixture; where the kernel can exchange two names there is not even a
moment without a folder. Files are copied, never linked or moved: editing a published checkpoint must not
change the workspace's own. Files of the owner in an older export's folder are carried over.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distribute.errors import StageError, TargetError
from distribute.swap import UNUSABLE, lock_of, put_in_place, recover, release_lock, sync_folder, take_lock
from infra.release import RECEIPT, LocalFile, stale_names

_CHUNK_BYTES = 4 << 20


class FolderTarget:
    """Publishes into `folder`, an absolute path that need not exist. See `infra.storage.Target`."""

    def __init__(self, folder: Path, *, overwrite: bool = False):
        # The swap must happen where the files are, not where a symbolic link to them is.
        self.folder = folder.resolve()
        self.overwrite = overwrite
        self._partial = self.folder.with_name(f".{self.folder.name}.nogather-partial")
        self._lock_path = lock_of(self.folder)
        self._lock: int | None = None  # descriptor, from `plan` to `seal` or `discard`

    @property
    def address(self) -> str:
        return str(self.folder)

    def preflight(self) -> str:
        with self._explained("write to"):
            self._recover()
            found = self._look()
            parent = next(p for p in self.folder.parents if p.exists())
            if not parent.is_dir():
                raise TargetError(f"{self.folder} cannot be made: {parent} is a file")
            # Only a real attempt tells: read-only mounts and quotas do not show in permission bits.
            os.rmdir(tempfile.mkdtemp(prefix=".nogather-probe-", dir=parent))
        return f"{self.folder}: writable, {found}"

    def kept(self) -> frozenset[str]:
        return frozenset()  # a card there is that of the older export

    def plan(self, files: Sequence[LocalFile]) -> list[LocalFile]:
        with self._explained("write to"):
            self._look()
            self._acquire()
            for file in files:
                if file.path.resolve().is_relative_to(self.folder):
                    raise TargetError(f"{file.path} lies in the target {self.folder}; choose another folder")
            missing = [file for file in files if not self._holds(file)]
            self._check_space(missing)
        return missing

    def put(self, files: Sequence[LocalFile], *, on_progress: Callable[[str, int], None]) -> None:
        with self._explained("write to"):
            self._partial.mkdir(parents=True, exist_ok=True)
            for file in files:
                self._copy(file, on_progress)

    def commit(self, files: Sequence[LocalFile]) -> str | None:
        """Take away what does not belong to the set. `seal` makes it visible, once it is verified."""
        with self._explained("write to"):
            self._partial.mkdir(parents=True, exist_ok=True)
            names = {file.name for file in files}
            for name in _names(self._partial):
                if name not in names:
                    (self._partial / name).unlink()
        return None

    def verify(self, files: Sequence[LocalFile]) -> dict[str, dict[str, Any]]:
        with self._explained("read"):
            remote = {}
            for file in files:
                path = self._partial / file.name
                size, digest = path.stat().st_size, _sha256(path)
                if (size, digest) != (file.size, file.sha256):
                    raise StageError(
                        f"{self.folder}: {file.name} reads back as {size} bytes with sha256 {digest[:12]}, "
                        f"not {file.size} bytes with {file.sha256[:12]}; the disk or the copy is damaged"
                    )
                remote[file.name] = {"size": size, "sha256": digest}
        return remote

    def seal(self, receipt: dict[str, Any]) -> None:
        with self._explained("write to"):
            self._carry_over({entry["name"] for entry in receipt["files"]})
            _write_durably(self._partial / RECEIPT, json.dumps(receipt, indent=2).encode() + b"\n")
            self._swap()
            self._release()

    def discard(self) -> None:
        if self._lock is not None:  # else the copy is somebody else's
            # A full disk is the usual reason to come here, so the copy does not stay.
            shutil.rmtree(self._partial, ignore_errors=True)
            self._release()

    # ---- parts

    def _acquire(self) -> None:
        """Keep other runs out of the copy."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._lock or take_lock(self._lock_path)
        if self._lock is None:
            raise TargetError(f"another run is publishing to {self.folder}; wait for it or stop it")

    def _release(self) -> None:
        assert self._lock is not None
        release_lock(self._lock_path, self._lock)
        self._lock = None

    def _look(self) -> str:
        """What the folder is now. Raises TargetError when replacing it would destroy somebody's files."""
        if not self.folder.exists():
            return "new"
        if not self.folder.is_dir():
            raise TargetError(f"{self.folder} is a file; name a folder")
        if (self.folder / RECEIPT).is_file():
            return "holds an earlier export, which will be replaced"
        if not any(self.folder.iterdir()):
            return "empty"
        if self.overwrite:
            return "holds other files, overwrite is on"
        raise TargetError(
            f"{self.folder} is not empty and holds no earlier export ({RECEIPT}); "
            "choose a new folder or allow overwriting"
        )

    def _holds(self, file: LocalFile) -> bool:
        """Whether an ended attempt left a whole copy of `file`."""
        path = self._partial / file.name
        return path.is_file() and path.stat().st_size == file.size and _sha256(path) == file.sha256

    def _check_space(self, missing: Sequence[LocalFile]) -> None:
        parent = next(p for p in self.folder.parents if p.exists())
        needed, free = sum(file.size for file in missing), shutil.disk_usage(parent).free
        if needed > free:
            raise TargetError(
                f"{self.folder} needs {needed / 1e9:.1f} GB but {parent} has {free / 1e9:.1f} GB free; "
                "make room or choose another target"
            )

    def _copy(self, file: LocalFile, on_progress: Callable[[str, int], None]) -> None:
        destination = self._partial / file.name
        destination.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with file.path.open("rb") as source, destination.open("wb") as copy:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                copy.write(chunk)
                on_progress(file.name, len(chunk))
            copy.flush()
            os.fsync(copy.fileno())
        if digest.hexdigest() != file.sha256:
            raise StageError(f"{file.path} changed since it was written (sha256 differs); run the export again")

    def _carry_over(self, new: set[str]) -> None:
        """Copy the owner's own files (a README, notes) from the folder that is about to be replaced."""
        if not self.folder.is_dir():
            return
        present = _names(self.folder)
        stale = stale_names(present, new, read_receipt(self.folder / RECEIPT))
        for name in present:
            if name not in new and name not in stale and name != RECEIPT:
                (self._partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.folder / name, self._partial / name, follow_symlinks=False)

    def _swap(self) -> None:
        old = put_in_place(self._partial, self.folder)
        sync_folder(self.folder.parent)
        if old is not None:
            shutil.rmtree(old)

    def _recover(self) -> None:
        """A kill between two renames left the older export aside: put it back."""
        if self.folder.parent.is_dir() and (lock := take_lock(self._lock_path)) is not None:
            recover(self.folder)
            release_lock(self._lock_path, lock)

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = TargetError if error.errno in UNUSABLE else StageError
            raise kind(f"cannot {action} {self.folder}: {error.strerror or error}") from error


def read_receipt(path: Path) -> dict[str, Any] | None:
    """The receipt in `path`, None when there is none or it is not JSON."""
    try:
        receipt = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return receipt if isinstance(receipt, dict) else None


def _names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or p.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
