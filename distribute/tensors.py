"""Bytes of safetensors files as tensors and back. Reads with pread, never mmap.

A mapped file counts as resident memory as soon as it is touched; with pread a rank's memory is what it holds.
"""

import os
from pathlib import Path

import torch

from distribute.source import ITEMSIZE, Checkpoint, TensorEntry

#: torch dtype by safetensors dtype name.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
#: safetensors dtype name by torch dtype.
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def read_tensor(checkpoint: Checkpoint, name: str, rows: range | None = None) -> torch.Tensor:
    """A tensor of the checkpoint, or the given rows (contiguous, along dim 0), on the CPU in its stored dtype.

    Raises:
        KeyError: the checkpoint has no such tensor.
        OSError: the file cannot be read or ended early.
    """
    return read_entry(checkpoint.folder, checkpoint.tensors[name], rows)


def read_entry(folder: Path, entry: TensorEntry, rows: range | None = None) -> torch.Tensor:
    """As `read_tensor`, for an entry of any folder."""
    begin, end, shape = byte_range(entry, rows)
    buffer = bytearray(end - begin)
    with (folder / entry.file).open("rb") as file:
        read_exactly(file.fileno(), buffer, begin)
    if not buffer:
        return torch.empty(shape, dtype=DTYPES[entry.dtype])
    return torch.frombuffer(buffer, dtype=DTYPES[entry.dtype]).reshape(shape)


def byte_range(entry: TensorEntry, rows: range | None) -> tuple[int, int, tuple[int, ...]]:
    """(begin, end, shape) of contiguous rows of an entry; `begin` and `end` are offsets in its file."""
    if rows is None:
        return entry.begin, entry.end, entry.shape
    assert rows.step == 1 and 0 <= rows.start <= rows.stop <= entry.shape[0], (entry, rows)
    per_row = entry.nbytes // entry.shape[0] if entry.shape[0] else ITEMSIZE[entry.dtype]
    return (
        entry.begin + rows.start * per_row,
        entry.begin + rows.stop * per_row,
        (len(rows), *entry.shape[1:]),
    )


def read_exactly(fd: int, buffer: bytearray, offset: int) -> None:
    """Fill `buffer` from a file; OSError when the file ends before."""
    view = memoryview(buffer)
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            raise OSError(f"file ended at byte {offset}, {len(view)} bytes early")
        view, offset = view[count:], offset + count


def to_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor as safetensors stores them: row-major, little-endian (x86 and Arm are)."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
