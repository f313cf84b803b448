"""Reading the memory of another process of this host and user, once and straight to where it is wanted.

For large tensors this is several times faster than a shared segment: the writer copies nothing, no page of /dev/shm
is made and freed, and the reader's pages may be huge ones. Nothing has a name, so nothing can be left behind. Linux
only (process_vm_readv(2)); where the kernel, Yama or a container forbids it, `read` raises OSError and the caller
takes another way. The writer allows one reader, and only for as long as the reading takes.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from distribute.segments import new_name, owner_lives
from distribute.state import Layout

LEAST_BYTES = 1 << 20  # below, a segment is as fast
MOST_RANGES = 1000
MOST_THREADS = 4
PIECE_BYTES = 8 << 20
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)

Range = Sequence[int]  # address in the writer, bytes, offset in the state


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Offer:
    """A state that another process may read from this one, for as long as this object lives."""

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]):
        self._head = bytearray(layout.head)
        self._parts = {0: torch.frombuffer(self._head, dtype=torch.uint8)}
        self._parts |= {begin: tensors[name] for name, begin in layout.begins.items() if tensors[name].numel()}

    @staticmethod
    def can_be(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a state is worth it and lies in plain memory."""
        return (
            layout.nbytes >= LEAST_BYTES
            and len(tensors) < MOST_RANGES
            and hasattr(_libc, "process_vm_readv")
            and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values())
        )

    @property
    def ranges(self) -> list[Range]:
        """Where everything is."""
        return [(part.data_ptr(), part.nbytes, begin) for begin, part in self._parts.items()]


def identify() -> dict[str, int | str]:
    """This process, for others of its host: JSON."""
    return {"pid": os.getpid(), "owner": new_name()}


def is_neighbour(process: Mapping[str, int | str]) -> bool:
    """Whether a process number of another process means that process here: it lives, in the same pid namespace."""
    return owner_lives(str(process["owner"])) is True


def allow(reader: int) -> None:
    """Let a process read this one's memory, as Yama wants it; 0: nobody any more. Without Yama nothing changes."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)


def read(pid: int, ranges: Sequence[Range], nbytes: int) -> mmap.mmap:
    """Private memory of `nbytes` bytes with the ranges of another process at their offsets.

    Raises:
        OSError: it is not allowed, or the process or its memory is gone.
    """
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    base = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    assert all(0 <= offset <= offset + count <= nbytes for _, count, offset in ranges), (ranges, nbytes)
    pieces = [(address, count, base + offset) for address, count, offset in _cut(ranges)]
    # The writer waits, so at least its core is free; most of the time goes into pages that the kernel makes.
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)), len(pieces))) as pool:
        for _ in pool.map(lambda piece: _read_range(pid, *piece), pieces):
            pass
    return buffer


def _cut(ranges: Sequence[Range]) -> Iterator[Range]:
    for address, count, offset in ranges:
        for begin in range(0, count, PIECE_BYTES):
            yield address + begin, min(PIECE_BYTES, count - begin), offset + begin


def _read_range(pid: int, address: int, count: int, target: int) -> None:
    done = 0
    while done < count:
        local, remote = _Iovec(target + done, count - done), _Iovec(address + done, count - done)
        got = _call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if got <= 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error) if error else "the memory ended")
        done += got


def _call(*arguments: object) -> int:
    function = _libc.process_vm_readv
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip
    return function(*arguments)
