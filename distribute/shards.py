"""safetensors files written in place: header bytes, preallocation, byte ranges, index. Torch-free.

Format (safetensors README): 8 bytes little-endian header length, a JSON header padded with spaces to a multiple
of 8, then the data. A file made here equals, byte for byte, what safetensors' own serializer writes: tensors
ordered by dtype (a fixed order, widest first), then by name, and `__metadata__` first in the header.

Files are opened write-only and written with pwrite, so two hosts never overwrite each other's page remainder.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from distribute.errors import WorkspaceError
from distribute.layers import natural_key
from distribute.source import INDEX_NAME, ITEMSIZE, SINGLE_NAME, TensorEntry

METADATA = {"format": "pt"}
_DTYPE_ORDER = {dtype: position for position, dtype in enumerate(ITEMSIZE)}


@dataclass(frozen=True)
class ShardFile:
    """One weight file: its name and its size in bytes, header included."""

    name: str
    size: int


Spec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def plan_files(specs: Iterable[Spec], max_shard_bytes: int) -> tuple[list[ShardFile], list[TensorEntry]]:
    """Pack tensors into files in natural name order; a tensor larger than the limit gets a file of its own.

    `max_shard_bytes` bounds the tensor bytes of a file. Pure: a function of its arguments alone.
    """
    groups: list[list[Spec]] = []
    filled = max_shard_bytes + 1
    for spec in sorted(specs, key=lambda spec: natural_key(spec[0])):
        size = nbytes(spec)
        if filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    files, placed = [], []
    for number, group in enumerate(groups, 1):
        name = SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        members = _place(name, group)
        files.append(ShardFile(name, max(tensor.end for tensor in members)))
        placed += members
    return files, placed


def nbytes(spec: Spec) -> int:
    """Bytes of a tensor's data."""
    return prod(spec[2]) * ITEMSIZE[spec[1]]


def header_bytes(tensors: Sequence[tuple[Spec, int, int]]) -> bytes:
    """Header of a file, length field included; each item is (spec, begin, end) relative to the data."""
    fields: dict[str, Any] = {"__metadata__": METADATA}
    for (name, dtype, shape), begin, end in tensors:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_header(placed: Iterable[TensorEntry]) -> bytes:
    """Header of the file that these tensors make up."""
    tensors = sorted(placed, key=lambda tensor: (_DTYPE_ORDER[tensor.dtype], tensor.name))
    data = min((tensor.begin for tensor in tensors), default=0)
    return header_bytes([((t.name, t.dtype, t.shape), t.begin - data, t.end - data) for t in tensors])


def preallocate(path: Path, size: int, header: bytes) -> None:
    """Create a file of its final size with its header.

    Raises:
        WorkspaceError: the disk is full.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _reserve(fd, size)
        write_range(fd, header, 0)
    except BaseException as error:
        path.unlink(missing_ok=True)  # give the space back that was claimed before the disk was full
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise WorkspaceError(
                f"{path.parent} has no room for {path.name} ({size} bytes): {error.strerror}; "
                "free space or use another folder"
            ) from None
        raise
    finally:
        os.close(fd)


def write_range(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of a file opened for writing."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def write_index(folder: Path, placed: Sequence[TensorEntry]) -> None:
    """Write the index of a checkpoint of several files; one file needs none."""
    weight_map = {tensor.name: tensor.file for tensor in sorted(placed, key=lambda tensor: natural_key(tensor.name))}
    if len(set(weight_map.values())) < 2:
        return
    total = sum(tensor.end - tensor.begin for tensor in placed)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def sha256(path: Path, *, on_bytes: Callable[[int], None] = lambda count: None, chunk: int = 1 << 20) -> str:
    """sha256 of a file, read in `chunk` bytes; `on_bytes` is told of each chunk."""
    digest = hashlib.sha256()
    buffer = bytearray(chunk)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            on_bytes(count)
    return digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _place(file: str, group: Sequence[Spec]) -> list[TensorEntry]:
    ordered = sorted(group, key=lambda spec: (_DTYPE_ORDER[spec[1]], spec[0]))
    ends, end = [], 0
    for spec in ordered:
        end += nbytes(spec)
        ends.append(end)
    spans = [(spec, end - nbytes(spec), end) for spec, end in zip(ordered, ends, strict=True)]
    data = len(header_bytes(spans))
    return [TensorEntry(*spec, file, data + begin, data + end) for spec, begin, end in spans]


def _reserve(fd: int, size: int) -> None:
    """Claim the blocks now, so that a full disk is met before any work; file systems that cannot are left sparse."""
    try:
        os.posix_fallocate(fd, 0, max(size, 1))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    os.ftruncate(fd, size)
