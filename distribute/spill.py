"""Hidden states of many batches: in memory up to a limit, beyond it in files of the workspace.

One rank's own; nobody else reads the files. They are removed by `close`, and by whoever uses the folder next.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class Spill:
    """Tensors by index. `limit_bytes` are kept in memory; files go to `folder`, which is emptied first."""

    def __init__(self, folder: Path, limit_bytes: int, device: torch.device | str = "cpu"):
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._device = str(device)
        self._held: dict[int, Tensor] = {}
        self._count = 0
        shutil.rmtree(folder, ignore_errors=True)

    def __len__(self) -> int:
        return self._count

    @property
    def bytes_held(self) -> int:
        """Bytes in memory."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def append(self, tensor: Tensor) -> None:
        """One more, at the end."""
        self._count += 1
        self[self._count - 1] = tensor

    def __getitem__(self, index: int) -> Tensor:
        if index in self._held:
            return self._held[index]
        return load_file(self._path(index), device=self._device)["hidden"]

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        self._held.pop(index, None)
        if self.bytes_held + tensor.nbytes <= self._limit_bytes:
            self._held[index] = tensor
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        save_file({"hidden": tensor.contiguous()}, self._path(index))

    def close(self) -> None:
        """Drop everything."""
        self._held.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"
