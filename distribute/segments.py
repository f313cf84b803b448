"""Shared-memory segments: files in /dev/shm that one process fills and one other maps.

A name cannot be guessed and says who made it: boot, pid namespace, pid and the process's start time. So a segment
left by a killed process is recognised and removed by the next run, and never one of a process that lives. Space is
reserved before anything is written: a full /dev/shm is then an error, not a SIGBUS, and a file in the folder for
temporary files takes its place. The resource tracker of `multiprocessing` is not involved.
"""

import contextlib
import errno
import hashlib
import itertools
import logging
import mmap
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from distribute.errors import WorkspaceError

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "nogather-"
FOREIGN_LIMIT_S = 7 * 86400.0  # age at which a file whose owner cannot be asked after counts as left
_NAME = re.compile(PREFIX + r"(?P<boot>[0-9a-f]{8})-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-z.-]+")
_calls = itertools.count()


def new_name(pid: int | None = None) -> str:
    """A file name nobody can guess, with its owner, the job and a call number: for everything that may be left.

    The owner is this process, or the one with number `pid`.
    """
    job = hashlib.sha256(os.environ.get("TORCHELASTIC_RUN_ID", "").encode()).hexdigest()[:8]
    owner = f"{_boot_id()[:8]}-{_pid_namespace()}-{pid or os.getpid()}-{_start_time(str(pid or 'self')) or 0}"
    return f"{PREFIX}{owner}-{job}-{next(_calls)}-{secrets.token_hex(8)}"


def host() -> str:
    """Names what the processes have in common that can share segments: the kernel and the mount of /dev/shm."""
    mount = SHARED_MEMORY.stat().st_dev if SHARED_MEMORY.is_dir() else 0
    return f"{_boot_id()}-{mount}"


def write_segment(nbytes: int, fill: Callable[[int], None]) -> Path:
    """Make a segment of `nbytes` > 0 bytes, private to this user, and let `fill` write to it. The caller unlinks.

    Raises:
        WorkspaceError: neither /dev/shm nor the folder for temporary files has room.
    """
    collect_dead_once(SHARED_MEMORY)
    path = SHARED_MEMORY / new_name()
    try:
        fd = _reserve(path, nbytes)
    except OSError as error:
        path = Path(tempfile.gettempdir()) / path.name
        collect_dead_once(path.parent)
        fd = _reserve_in_file(path, nbytes, error)
    try:
        try:
            fill(fd)
        finally:
            os.close(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def map_segment(path: Path, nbytes: int) -> mmap.mmap:
    """Map a segment another process has written. The memory lives until the last view of it is gone.

    Raises:
        OSError: it is not there, or not of this size.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_size != nbytes:
            raise OSError(f"segment {path} holds {os.fstat(fd).st_size} bytes instead of {nbytes}")
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def collect_dead(folder: Path, foreign_limit_s: float = FOREIGN_LIMIT_S) -> int:
    """Remove what processes of this host left in `folder` and no longer own; returns how many files.

    What processes of other hosts and containers made goes when it is older than `foreign_limit_s` seconds.
    """
    removed = 0
    try:
        names = [entry.name for entry in os.scandir(folder) if _NAME.fullmatch(entry.name)]
    except OSError:
        return 0
    for name in names:
        with contextlib.suppress(OSError):  # another rank was faster, or the file belongs to another user
            if is_left_over(folder / name, [name], foreign_limit_s):
                (folder / name).unlink()
                removed += 1
    return removed


def is_left_over(path: Path, owners: Iterable[str], foreign_limit_s: float) -> bool:
    """Whether all `owners` (of `new_name`) ended; when that cannot be known here, whether the file is old."""
    lives = [owner_lives(owner) for owner in owners]
    if any(lives):
        return False
    if lives and None not in lives:
        return True
    return time.time() - path.lstat().st_mtime > foreign_limit_s


def owner_lives(name: str) -> bool | None:
    """Whether the process that made `name` with `new_name` still runs; None when that cannot be known here."""
    match = _NAME.fullmatch(name)
    # A pid says something only in its own boot and pid namespace: elsewhere the owner may live unseen.
    if match is None or (match["boot"], match["space"]) != (_boot_id()[:8], str(_pid_namespace())):
        return None
    return _start_time(match["pid"]) == int(match["start"])


@cache
def collect_dead_once(folder: Path) -> int:
    """`collect_dead`, at most once a process and folder."""
    return collect_dead(folder)


def _reserve(path: Path, nbytes: int) -> int:
    """Descriptor of a new file of `nbytes` bytes, all of them backed; OSError, and no file, without room."""
    stat = os.statvfs(path.parent)
    if stat.f_bavail * stat.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # the check above is only quick: other ranks reserve at the same time
    except BaseException:
        os.close(fd)
        path.unlink()
        raise
    return fd


def _reserve_in_file(path: Path, nbytes: int, cause: OSError) -> int:
    needed = f"{nbytes / 2**20:.1f} MiB are needed in {SHARED_MEMORY}, which has {_free(SHARED_MEMORY)}"
    try:
        fd = _reserve(path, nbytes)
    except OSError as error:
        raise WorkspaceError(
            f"{needed} ({cause.strerror}), and {path.parent} has {_free(path.parent)} ({error.strerror}); make "
            "/dev/shm larger (docker run --shm-size), point TMPDIR to a disk with room, or give a workspace path"
        ) from None
    _warn_once(path.parent)
    return fd


@cache
def _warn_once(folder: Path) -> None:
    log.warning(
        "%s has too little room; files in %s are used instead (docker run --shm-size makes it larger)",
        SHARED_MEMORY,
        folder,
    )


def _free(folder: Path) -> str:
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        return f"nothing ({error.strerror})"
    return f"{stat.f_bavail * stat.f_frsize / 2**20:.1f} MiB free"


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: str) -> int | None:
    """Clock ticks from boot to the start of a process (proc(5), field 22); None when it ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])
