"""One folder takes the place of another, whole: lock, exchange of names, the way back after a kill. Torch-free.

A reader of the folder sees the old content or the new, never a mixture; where the kernel can exchange two names
there is not even a moment without a folder. Everything made here is a hidden sibling of the folder.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h

#: What the user can mend: no permission, no such place, no room.
UNUSABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL,
    errno.ENOSPC, errno.EDQUOT,
)  # fmt: skip


def lock_of(folder: Path) -> Path:
    """The file whose lock gives the right to replace `folder`."""
    return folder.with_name(f".{folder.name}.nogather-lock")


def take_lock(path: Path) -> int | None:
    """Lock the file `path`; None when another process has it. The kernel lets go, however this process ends."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        with suppress(FileNotFoundError):
            # The one who had it may have removed the file between our open and our lock.
            if os.fstat(fd).st_ino == path.stat().st_ino:
                return fd
        os.close(fd)


def release_lock(path: Path, fd: int) -> None:
    """Give back what `take_lock` gave."""
    path.unlink(missing_ok=True)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough while a forked child holds a copy
    os.close(fd)


def put_in_place(new: Path, folder: Path) -> Path | None:
    """Give `new`, a sibling, the name `folder`, which may exist. Needs the lock.

    Returns:
        Where the old folder is now, for the caller to remove; None when there was none.

    Raises:
        OSError: nothing has changed.
    """
    if not folder.exists():
        new.rename(folder)
        return None
    if exchange(new, folder):
        return new
    aside = _aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    try:
        new.rename(folder)
    except OSError:
        aside.rename(folder)
        raise
    return aside


def recover(folder: Path) -> None:
    """Undo or finish what a kill in `put_in_place` left. Needs the lock: else another process may be at it."""
    aside = _aside(folder)
    if not aside.exists():
        return
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.rename(folder)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step (renameat2 with RENAME_EXCHANGE); False where that is not offered."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems refuse to sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.nogather-old")
