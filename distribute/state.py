"""A state: JSON metadata and named tensors as the bytes of a safetensors file, in memory or on disk.

Format (safetensors README): 8 bytes little-endian header length, a JSON header padded with spaces to a multiple
of 8, then the data; tensors with the widest elements come first, so each is aligned. Copies every byte once when
writing and not at all when reading from memory. Knows neither ranks nor folders.
"""

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from distribute.errors import UserError
from distribute.source import ITEMSIZE
from distribute.tensors import DTYPES, NAMES, to_bytes

METADATA = "__metadata__"
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Layout:
    """Where everything lies: `head` are the bytes before the data, `begins` absolute byte offsets in data order."""

    head: bytes
    begins: dict[str, int]
    nbytes: int

    @property
    def has_data(self) -> bool:
        """Whether any tensor has an element."""
        return self.nbytes > len(self.head)


def plan_layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Layout:
    """The layout of a state. Pure; looks at dtypes and shapes only.

    Raises:
        UserError: a tensor has a reserved name, or a dtype that safetensors does not have.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    relative, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        if name == METADATA or tensor.dtype not in NAMES:
            raise UserError(
                f"tensor {name!r} of dtype {tensor.dtype} cannot be stored; "
                f"any name but {METADATA} and these dtypes can: {', '.join(map(str, NAMES))}"
            )
        relative[name], end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [relative[name], end],
        }
    text = json.dumps(header).encode()  # ASCII only, so names survive whatever characters they hold
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Layout(head, {name: len(head) + begin for name, begin in relative.items()}, len(head) + end)


def copy_into(
    buffer: Any, layout: Layout, tensors: Mapping[str, torch.Tensor], names: Iterable[str] | None = None
) -> None:
    """Write a state (or `names` of it alone) into a buffer of `layout.nbytes` bytes; any device, any strides."""
    if names is None:
        memoryview(buffer)[: len(layout.head)] = layout.head
    for name in layout.begins if names is None else names:
        tensor = tensors[name]
        if tensor.numel():
            target = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=layout.begins[name])
            target.view(tensor.shape).copy_(tensor)


def write_into(fd: int, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a state into a file of `layout.nbytes` bytes, open for reading and writing; any device, any strides.

    Plain tensors are written, not copied into a mapping: the kernel then fills new pages at once, instead of
    clearing each first and taking a fault for it. That is twice as fast in shared memory.
    """
    mapped = []
    with open(fd, "wb", buffering=BUFFER_BYTES, closefd=False) as file:
        file.write(layout.head)
        for name, begin in layout.begins.items():
            tensor = tensors[name]
            if tensor.is_contiguous() and tensor.device.type == "cpu":
                file.write(to_bytes(tensor))
            elif tensor.numel():
                mapped.append(name)
                file.seek(begin + tensor.numel() * tensor.element_size())
    if mapped:
        copy_into(mmap.mmap(fd, layout.nbytes), layout, tensors, mapped)


def from_buffer(buffer: Any) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """(metadata, tensors) of a state; the tensors are views and keep `buffer` alive.

    Raises:
        ValueError: the bytes are no state.
    """
    view = memoryview(buffer)
    begin = 8 + int.from_bytes(view[:8], "little")
    if len(view) < 8 or begin > len(view):
        raise ValueError(f"{len(view)} bytes cannot hold a header that ends at byte {begin}")
    try:
        header = json.loads(bytes(view[8:begin]))
        metadata = header.pop(METADATA)
        tensors = {name: _tensor(buffer, begin, len(view), entry) for name, entry in header.items()}
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the header is not that of a state: {error!r}") from None
    return metadata, tensors


def _tensor(buffer: Any, data: int, end: int, entry: Mapping[str, Any]) -> torch.Tensor:
    first, last = entry["data_offsets"]
    shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
    count = prod(shape)
    if not 0 <= first <= last <= end - data or last - first != count * ITEMSIZE[entry["dtype"]]:
        raise ValueError(f"an entry does not fit its {end - data} bytes of data: {entry}")
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=data + first).view(shape)
