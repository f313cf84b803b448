"""State files: a state (`state.py`) on a folder that other hosts may see, whole or not at all.

A file carries its size and a SHA-256 over all its bytes. It is written under a temporary name, flushed and renamed,
and checked when it is read. So a torn file is refused, and with the checksum its writer announced an old one as well.
"""

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from distribute.errors import WorkspaceError
from distribute.segments import new_name
from distribute.state import METADATA, Layout, from_buffer, plan_layout
from distribute.tensors import to_bytes

VISIBLE_LIMIT_S = 120.0  # NFS caches attributes for 60 s at most by default (nfs(5), acdirmax)
LONGEST_POLL_S = 0.5
SIZE = "size"
CHECKSUM = "sha256"
NO_CHECKSUM = "0" * 64

State = tuple[dict[str, str], dict[str, torch.Tensor]]


def make_private_folder(path: Path) -> None:
    """Make a folder (0700) with its parents; one that exists keeps its permissions."""
    with as_workspace_error(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not exist_ok: that asks is_dir(), which a stale NFS cache denies for what another host has just made.
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Write a state file (0600), visible whole or not at all; returns its checksum (hex SHA-256)."""
    nbytes = plan_layout(tensors, {**metadata, SIZE: f"{0:020}", CHECKSUM: NO_CHECKSUM}).nbytes
    layout = plan_layout(tensors, {**metadata, SIZE: f"{nbytes:020}", CHECKSUM: NO_CHECKSUM})
    temporary = path.with_name(new_name())
    with as_workspace_error(path):
        try:
            checksum = _write(temporary, layout, tensors)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    return checksum


def read_state(path: Path, checksum: str | None = None) -> State:
    """Read a state file and check every byte of it.

    Raises:
        OSError: the file is not there or cannot be read.
        WorkspaceError: it is damaged, or its checksum is not `checksum` (hex), so it is an older or newer one.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        # Not a mapping: a file replaced on another host would end this process with SIGBUS.
        buffer = bytearray(os.fstat(fd).st_size)
        view, count = memoryview(buffer), 0
        while count < len(buffer) and (read := file.readinto(view[count:])):
            count += read
    try:
        metadata, tensors = from_buffer(buffer)
        stored = metadata[CHECKSUM]
        if int(metadata[SIZE]) != len(buffer):
            raise ValueError(f"it has {len(buffer)} bytes instead of {int(metadata[SIZE])}")
        found = _checksum_without(buffer, stored)
    except (ValueError, KeyError) as error:
        raise WorkspaceError(f"{path} is damaged or not a state file: {error}; write it again") from None
    if found != stored:
        raise WorkspaceError(f"{path} is damaged: its bytes do not match its checksum; write it again")
    if checksum is not None and stored != checksum:
        raise WorkspaceError(f"{path} is not the state that was announced; is the folder used by another job?")
    return metadata, tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a state file, unchecked, without its tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no state file.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path} is cut short")
        metadata = json.loads(file.read(size)).get(METADATA)
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} has no metadata")
    return metadata


def await_state(path: Path, checksum: Callable[[], str], who: str, limit_s: float) -> State:
    """Read a state file that its writer has announced: NFS shows a file, or its new content, late.

    Args:
        checksum: asked before every attempt.
        who: whose state it is, for the message.

    Raises:
        WorkspaceError: it did not show up, whole, within `limit_s` seconds.
    """
    deadline, pause = time.monotonic() + limit_s, 0.01
    while True:
        try:
            return read_state(path, checksum())
        except (OSError, WorkspaceError) as error:
            cause: OSError | WorkspaceError = error
        if time.monotonic() >= deadline:
            raise WorkspaceError(f"{who} did not show up in {limit_s:g} s at {path}: {cause}") from None
        with contextlib.suppress(OSError):  # opening the folder makes NFS ask the server again
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)


def _write(path: Path, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(layout.head)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(layout.head)
        for name in layout.begins:
            data = to_bytes(tensors[name])
            digest.update(data)
            file.write(data)
        file.seek(_checksum_offset(layout.head, NO_CHECKSUM))
        file.write(digest.hexdigest().encode())
        file.flush()
        os.fsync(fd)
    return digest.hexdigest()


def _checksum_without(buffer: bytearray, stored: str) -> str:
    """SHA-256 over a file whose checksum field is blanked, as it was when the writer computed it."""
    begin = _checksum_offset(buffer, stored)
    view = memoryview(buffer)
    digest = hashlib.sha256(view[:begin])
    digest.update(NO_CHECKSUM.encode())
    digest.update(view[begin + len(NO_CHECKSUM) :])
    return digest.hexdigest()


def _checksum_offset(head: bytes | bytearray, stored: str) -> int:
    """The field is the last of the metadata; names of tensors come after it and configs before it are quoted."""
    field = f'"{CHECKSUM}": "'.encode()
    return head.index(field + stored.encode() + b'"') + len(field)


def _sync_folder(folder: Path) -> None:
    """Flush a rename. Network file systems do so themselves and may refuse, or not see the folder yet."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def as_workspace_error(path: Path) -> Iterator[None]:
    """An OSError is the fault of the folder the user gave."""
    try:
        yield
    except OSError as error:
        raise WorkspaceError(
            f"workspace {path}: {error.strerror or error}; give a folder with room to write"
        ) from error
