"""The export folder: the new checkpoint grows in a hidden folder and takes the place of the old one when it is whole.

Usually that is a sibling, and the two are swapped by one rename. The user's own files come along as hard links, or as
copies where there are no links. A folder that cannot be renamed (a mount point, a parent that is not writable) is
staged inside itself: index, config and the older weights go first, then come the new weights, the small files,
config.json and at last the index, so a reader finds the old checkpoint, the new one, or none. A note in the
staging folder lets the next export finish that after a kill. Torch-free; all but `await_visible` is for rank 0.
"""

import errno
import glob
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distribute.errors import StageError, TargetError
from distribute.live.carry import carry_over, old_files
from distribute.live.moving import is_moving, move_in, write_note
from distribute.segments import PREFIX, new_name, owner_lives
from distribute.swap import UNUSABLE, lock_of, put_in_place, recover, release_lock, sync_folder, take_lock

log = logging.getLogger(__name__)

FOREIGN_LEFTOVER_S = 7 * 24 * 3600.0
LONGEST_POLL_S = 0.5
#: A folder of others under the sticky bit, of a lower layer of an overlay, or in use as a mount point.
NO_SWAP = (errno.EPERM, errno.EACCES, errno.EXDEV, errno.EBUSY)
_TOKEN = ".token"


class Staging:
    """A new checkpoint on its way to `export_dir`, from construction to `commit` or `discard`.

    Everybody writes into `path`; `token` tells the other ranks that the `path` they see is this one.
    Construction makes missing parents, takes the lock and removes what dead exports left.

    Raises:
        TargetError: `export_dir` is a file, cannot be written, or another export to it is running.
        StageError: the file system failed.
    """

    def __init__(self, export_dir: Path | str):
        self.token = secrets.token_hex(16)
        self._lock: int | None = None
        with _explained(Path(export_dir)):
            self.folder = _checked(Path(export_dir))
            self._made = _make_parents(self.folder)
            try:
                self.path = self._begin()
                self._clean_up()
                (self.path / _TOKEN).write_text(self.token, encoding="ascii")
            except BaseException:
                self.discard()
                raise

    def commit(self, files: Iterable[str]) -> None:
        """Make the new checkpoint the content of `export_dir`: durable, whole, with the user's other files.

        Args:
            files: names of all that is in `path`. Every writer has flushed what it wrote.

        Raises:
            TargetError: no permission or no room; the old checkpoint is still there.
            StageError: the file system failed.
        """
        names = sorted(files)
        (self.path / _TOKEN).unlink(missing_ok=True)
        present = sorted(path.name for path in self.path.iterdir())
        assert present == names, f"staged {present}, told {names}"
        for name in names:
            if (self.folder / name).is_dir():
                raise TargetError(
                    f"{self.folder / name} is a folder; the checkpoint has a file of that name: remove it"
                )
        with _explained(self.folder):
            stale = old_files(self.folder) - set(names)
            for name in names:
                _sync_file(self.path / name)
            if self._is_inside or not self._swap(stale):
                write_note(self.path, names, sorted(stale))
                move_in(self.path, self.folder)
        self._release()

    def discard(self) -> None:
        """Remove what was staged and the parents that were made for it. Does nothing after `commit`."""
        # A half-done move holds the only whole copy: the next export finishes it.
        if self._lock is not None:
            if is_moving(self.path):
                log.warning("%s holds a part of the new checkpoint; export again to complete it", self.folder)
            else:
                shutil.rmtree(self.path, ignore_errors=True)
            self._release()
        for parent in self._made:
            with suppress(OSError):
                parent.rmdir()

    # ---- parts

    def _begin(self) -> Path:
        """Lock, then make the staging folder: beside the export folder if that is possible, else inside."""
        beside = lock_of(self.folder)
        places = [] if _is_mount(self.folder) else [beside]
        places += [self.folder / beside.name] if self.folder.is_dir() else []
        for place in places:
            try:
                return self._stage_at(place)
            except OSError as error:
                if place == places[-1] or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
        raise AssertionError(places)

    def _stage_at(self, lock_path: Path) -> Path:
        lock = take_lock(lock_path)
        if lock is None:
            raise TargetError(f"another export to {self.folder} is running; wait for it or stop it")
        path = lock_path.with_name(f".{self.folder.name}.{new_name()}")
        try:
            path.mkdir()
        except BaseException:
            release_lock(lock_path, lock)
            raise
        self._lock_path, self._lock = lock_path, lock
        return path

    @property
    def _start(self) -> str:
        """How the names of staging folders and locks begin."""
        return f".{self.folder.name}.{PREFIX}"

    @property
    def _is_inside(self) -> bool:
        return self.path.parent == self.folder

    def _clean_up(self) -> None:
        """Finish or remove what exports left that did not end. The lock says that none of them is still moving."""
        if not self._is_inside:
            recover(self.folder)
        for path in self._leftovers():
            if path.parent == self.folder and is_moving(path):
                move_in(path, self.folder)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _leftovers(self) -> Iterator[Path]:
        for place in (self.folder.parent, self.folder):
            for path in sorted(place.glob(f"{glob.escape(self._start)}*")):
                lives = owner_lives(path.name[len(self._start) - len(PREFIX) :])
                old = lives is None and time.time() - path.lstat().st_mtime > FOREIGN_LEFTOVER_S
                # A note counts here only: beside the folder anybody might have put it.
                moving = place == self.folder and is_moving(path)
                if path != self.path and path.is_dir() and (lives is False or old or moving):
                    yield path

    def _swap(self, stale: set[str]) -> bool:
        """Swap the folders; False when only content can be replaced: the staging folder is then inside."""
        leave = stale | {path.name for path in self.folder.glob(f"{glob.escape(self._start)}*")}
        if self.folder.is_dir():
            carry_over(self.folder, self.path, leave=leave)
            shutil.copystat(self.folder, self.path)
            os.utime(self.path)
        sync_folder(self.path)
        try:
            old = put_in_place(self.path, self.folder)
        except OSError as error:
            if error.errno not in NO_SWAP:
                raise
            inside = self.folder / self.path.name
            self.path.rename(inside)
            self.path = inside
            return False
        sync_folder(self.folder.parent)
        if old is not None:
            self._remove(old, leave)
        return True

    def _remove(self, old: Path, leave: set[str]) -> None:
        try:
            carry_over(old, self.folder, leave=leave)  # what came in since
            shutil.rmtree(old)
        except OSError as error:
            log.warning("%s is written; its older content could not be removed from %s: %s", self.folder, old, error)

    def _release(self) -> None:
        assert self._lock is not None
        release_lock(self._lock_path, self._lock)
        self._lock = None


def await_visible(path: Path, token: str, limit_s: float) -> None:
    """Wait until this rank sees the staging folder of rank 0: NFS shows it late. For the ranks other than 0.

    Raises:
        TargetError: it did not show up within `limit_s` seconds.
    """
    deadline, pause = time.monotonic() + limit_s, 0.01
    while True:
        with suppress(OSError):
            if (path / _TOKEN).read_text(encoding="ascii") == token:
                return
        if time.monotonic() >= deadline:
            raise TargetError(
                f"the folder {path} that rank 0 made did not show up here in {limit_s:g} s; "
                "export to a folder that all ranks see"
            )
        with suppress(OSError):  # opening the folder makes NFS ask the server again
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


def _checked(export_dir: Path) -> Path:
    """Where the folder really is: a swap must happen there, not where a symbolic link to it is."""
    try:
        folder = export_dir.expanduser().absolute().resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, or no home
        raise TargetError(f"export_dir {export_dir} leads nowhere: {error}") from None
    if not folder.name:
        raise TargetError(f"export_dir {export_dir} is the root; name a folder")
    parent = next(parent for parent in folder.parents if parent.exists())
    if not parent.is_dir():
        raise TargetError(f"export_dir {export_dir} cannot be made: {parent} is a file")
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise TargetError(f"export_dir {export_dir} is a file; name a folder")
    if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise TargetError(f"export_dir {export_dir} is not writable; choose another folder")
    return folder


def _make_parents(folder: Path) -> list[Path]:
    """Make the missing parents and return them, the deepest first."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    return missing


def _is_mount(folder: Path) -> bool:
    """Whether something is mounted here; a bind mount of the same file system shows in the kernel's list only."""
    if os.path.ismount(folder):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    points = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4]) for line in lines)
    return str(folder) in points


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = TargetError if error.errno in UNUSABLE else StageError
        raise kind(f"cannot write to export_dir {folder}: {error.strerror or error}") from error
