"""Ranks: which process this is, how many there are, on which device it computes, and how they meet.

The only place that knows devices. Works alone, without a process group, by the same code. Every method but
`close` is called by all ranks. Between ranks travel small records and absmax vectors, never weights.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from distribute.control import Control
from distribute.errors import UserError
from distribute.gather import get_configs_parallel
from distribute.segments import SHARED_MEMORY, collect_dead

COMPUTE_LIMIT_S = 1800.0  # torch's own default for gloo


@dataclass(frozen=True)
class Ranks:
    """This process among its peers.

    `group` is the compute group (None when alone); its limit does not bound any wait of this class.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    control: Control
    owns_group: bool  # whether `close` ends the process group

    @classmethod
    def start(cls, *, wait_limit_s: float | None = None, compute_limit_s: float = COMPUTE_LIMIT_S) -> "Ranks":
        """Join the other ranks as torchrun's environment says; alone without it. Called by all ranks.

        A process group that the caller has initialised is used and left alone.

        Args:
            wait_limit_s: how long to wait for a peer, which may be busy with files (None: NOGATHER_WAIT_LIMIT_S,
                or six hours).
            compute_limit_s: limit of the collectives in `group`.

        Raises:
            UserError: more ranks on this host than devices.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device = _own_device(local_rank)
        owns_group = not dist.is_initialized() and {"RANK", "WORLD_SIZE"} <= os.environ.keys()
        if owns_group:
            dist.init_process_group(_backend(device), timeout=timedelta(seconds=compute_limit_s))
        joined = dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        collect_dead(SHARED_MEMORY)
        collect_dead(Path(tempfile.gettempdir()))
        control = Control.of(range(world) if joined else [0], limit_s=wait_limit_s)
        return cls(rank, world, local_rank, device, dist.group.WORLD if joined else None, control, owns_group)

    @classmethod
    def join(cls, *, wait_limit_s: float | None = None) -> "Ranks":
        """Take part in the process group that the caller has initialised; alone without one. Called by all ranks.

        For library calls in somebody else's program: no device is chosen, and `close` leaves the group alone.
        """
        joined = dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        control = Control.of(range(world) if joined else [0], limit_s=wait_limit_s)
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        group = dist.group.WORLD if joined else None
        return cls(rank, world, local_rank, torch.device("cpu"), group, control, owns_group=False)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides and publishes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks, for hours if need be: they may be writing files."""
        self.control.exchange("barrier")

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """A step that all ranks take, or that fails on all of them with the same error.

        The body may use the methods of this object, but no other collective.

        Raises:
            RankError: rank -> reason; or the UserError of a rank, since it is the cause; or, when every failing
                rank has the same StageError, that one.
        """
        with self.control.together(step):
            yield

    def absmax(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum of |tensor| over ranks, exact; NaN wins. Same shape, dtype and device as `tensor`.

        Raises:
            UserError: dtype or shape differs between ranks.
        """
        kinds = self.control.exchange("absmax", [str(tensor.dtype), list(tensor.shape)])
        if any(kind != kinds[0] for kind in kinds.values()):
            raise UserError(f"absmax needs one dtype and shape on all ranks; given: {kinds}")
        # Non-negative floats order like their bits, and NaN lies above infinity. A float max would lose NaN or
        # keep it by the order of ranks.
        if not tensor.is_floating_point():
            bits = tensor.detach().to("cpu", torch.int64).abs()
            self._reduce(bits)
            return bits.to(tensor.device, tensor.dtype)
        wide, integer = (
            (torch.float64, torch.int64) if tensor.dtype == torch.float64 else (torch.float32, torch.int32)
        )
        bits = tensor.detach().to("cpu", wide).abs().reshape(-1).view(integer)
        self._reduce(bits)
        return bits.view(wide).reshape(tensor.shape).to(tensor.device, tensor.dtype)

    def _reduce(self, bits: torch.Tensor) -> None:
        if bits.numel():
            self.control.all_reduce_max(bits)

    def share(self, record: Any) -> Any:
        """The JSON record of rank 0, on all ranks; what the others give is ignored."""
        return self.control.exchange("share", record if self.is_first else None)[0]

    def gather(self, record: Any, workspace_path: Path | str | None = None) -> list[Any]:
        """Every rank's record in the order of ranks, on rank 0; an empty list on the others.

        A record is None or a nested dict, list or dataclass with tensors anywhere. Travels through the folder
        `workspace_path` where one is given, else through shared memory, or the network between hosts.
        """
        ranks, limit_s = list(range(self.world)), self.control.limit_s
        with get_configs_parallel(record, ranks, self.group, workspace_path, limit_s=limit_s) as records:
            return list(records)

    def close(self) -> None:
        """Leave the process group that `start` made. Peers that still wait for this rank then learn that it ended."""
        if self.owns_group and dist.is_initialized():
            Control.close_all()
            dist.destroy_process_group()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _own_device(local_rank: int) -> torch.device:
    """The accelerator of this rank, made current; the CPU where there is none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} has no device of its own; this host has {count}: start {count} ranks"
        )
    torch.accelerator.set_device_index(local_rank)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, local_rank)


def _backend(device: torch.device) -> str:
    """Gloo for CPU tensors and what torch uses for the device's own, for example "cpu:gloo,cuda:nccl"."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
