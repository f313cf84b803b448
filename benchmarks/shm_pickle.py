"""The documented alternative to `distribute`'s gathers: torch.save into shared memory, torch.load out of it.

The method of nvidia-modelopt 0.47 (`modelopt/torch/export/distribute.py`), written anew from its description: a
segment with a name known to all, of the tensors' bytes and 2048 more for each; `torch.save` straight into it; a
barrier; `torch.load(BytesIO(all of the segment))` on the reader; a barrier; the writer removes the segment.

The only place that pickles, because it is what is measured against; nothing of the library imports benchmarks.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
import torch.distributed as dist

ROOM_PER_TENSOR = 2048
LENGTH_BYTES = 8


@contextmanager
def gather_tensors(tensor: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Both ranks' tensors on rank 0, by the pickle method. Called by ranks 0 and 1; yields an empty list on 1."""
    segment = None
    if dist.get_rank() == 1:
        segment = SharedMemory("bench_rank_1", create=True, size=tensor.nbytes + ROOM_PER_TENSOR)
        torch.save(tensor, segment._mmap)  # type: ignore[attr-defined]
    with _handed_over(segment, "bench_rank_1") as read:
        yield [tensor, torch.load(BytesIO(_buffer(read)))] if read else []


@contextmanager
def gather_configs(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], *, cut: bool = False
) -> Iterator[list[dict[str, torch.Tensor]]]:
    """As `gather_tensors` for a JSON config and its tensors.

    Args:
        cut: tell the reader where the pickle ends. The documented method does not: it reads the unused room
            too, and from some tens of tensors on the zip format's end record is no longer found behind it.

    Raises:
        RuntimeError: on rank 0, when the pickle cannot be read.
    """
    text = json.dumps(config).encode()
    room = sum(len(name) + tensor.nbytes + ROOM_PER_TENSOR for name, tensor in tensors.items())
    segment, end = None, torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 1:
        segment = SharedMemory("bench_rank_1_config", create=True, size=LENGTH_BYTES + len(text) + room)
        buffer = _buffer(segment)
        buffer[:LENGTH_BYTES] = len(text).to_bytes(LENGTH_BYTES, "little")
        buffer[LENGTH_BYTES : LENGTH_BYTES + len(text)] = text
        file: Any = segment._mmap  # type: ignore[attr-defined]
        file.seek(LENGTH_BYTES + len(text))
        torch.save(tensors, file)
        end[0] = file.tell()
    if cut:
        dist.broadcast(end, 1)
    with _handed_over(segment, "bench_rank_1_config") as read:
        if read is None:
            yield []
            return
        length = int.from_bytes(_buffer(read)[:LENGTH_BYTES], "little")
        json.loads(bytes(_buffer(read)[LENGTH_BYTES : LENGTH_BYTES + length]))
        with _buffer(read)[LENGTH_BYTES + length : int(end) if cut else None] as pickled:
            yield [tensors, torch.load(BytesIO(pickled))]


@contextmanager
def _handed_over(segment: SharedMemory | None, name: str) -> Iterator[SharedMemory | None]:
    """The segment on rank 0, which gives no `segment`; None on the other, which removes its own at the end."""
    dist.barrier()
    read = SharedMemory(name) if segment is None else None
    try:
        yield read
    finally:
        if read is not None:
            read.close()
        dist.barrier()
        if segment is not None:
            segment.close()
            segment.unlink()


def _buffer(segment: SharedMemory) -> memoryview:
    assert segment.buf is not None, "closed"
    return segment.buf
