"""The arguments of a live export, checked, and the same on all ranks."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from distribute.errors import UserError
from distribute.live.state import KV_CACHE_FORMATS
from distribute.ranks import Ranks
from distribute.sizes import parse_size


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside (Distributed)DataParallel and torch.compile, whose names are those of the checkpoint.

    Raises:
        UserError: something inside is wrapped in a way that changes names or hides shards.
    """
    inner: Any = model
    while isinstance(inner, DataParallel | DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    for name, module in inner.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UserError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel, whose shards have no rows; "
                "shard with torch.distributed.fsdp.fully_shard"
            )
        if hasattr(module, "_orig_mod"):
            raise UserError(f"{name} is wrapped by torch.compile, which changes names; use {name}.compile()")
    return inner


@dataclass(frozen=True)
class Request:
    """The arguments, checked."""

    folder: Path
    maxbound: float
    kv_cache_format: str | None
    max_shard_bytes: int
    is_modelopt_qlora: bool

    @classmethod
    def of(cls, model: Any, export_dir: Any, maxbound: Any, kv_cache_format: Any, size: Any, qlora: Any) -> "Request":
        if not isinstance(model, torch.nn.Module):
            raise UserError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
        if not isinstance(export_dir, Path | str) or not str(export_dir):
            raise UserError(f"export_dir is {export_dir!r}; give the path of a folder")
        if isinstance(size, bool) or not isinstance(size, int | str) or (isinstance(size, int) and size <= 0):
            raise UserError(f"max_shard_size is {size!r}; give a size such as '10GB', or bytes above 0")
        if isinstance(maxbound, bool) or not isinstance(maxbound, int | float):
            raise UserError(f"maxbound is {maxbound!r}; give the largest value of a K/V cache, 448 for FP8 and NVFP4")
        if not 0 < maxbound < inf:
            raise UserError(f"maxbound is {maxbound}; give a number above 0, 448 for FP8 and NVFP4")
        if kv_cache_format is not None and kv_cache_format not in KV_CACHE_FORMATS:
            raise UserError(
                f"kv_cache_format is {kv_cache_format!r}; a checkpoint can hold {', '.join(KV_CACHE_FORMATS)}; "
                "None is for a cache that is not quantized"
            )
        limit = size if isinstance(size, int) else parse_size(size)
        return cls(Path(export_dir).absolute(), float(maxbound), kv_cache_format, limit, bool(qlora))

    def refuse_unlike(self, ranks: Ranks) -> None:
        """Raise the same UserError on all ranks when they were called with different arguments."""
        given = ranks.control.exchange(
            "compare the arguments", {name: str(value) for name, value in vars(self).items()}
        )
        for rank, arguments in given.items():
            unlike = [name for name, value in arguments.items() if value != given[0][name]]
            if unlike:
                raise UserError(
                    f"all ranks must give the same arguments, but {unlike[0]} is {given[0][unlike[0]]} on rank 0 "
                    f"and {arguments[unlike[0]]} on rank {rank}"
                )
