"""The two gathers of the documented API: what every rank has, in a list on the first rank, inside a `with`.

Data goes through shared memory of one host, through files in a workspace folder, or over gloo (`delivery.py`).
Nothing that is left for the first rank has a name while the caller's body runs, so nothing stays behind even by a
kill in a long body. A rank that fails, here or in the body, makes all of them raise the same error. No weight is
gathered by any stage of the pipeline: these are for records, scales and merges of small parts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distribute.control import Control
from distribute.delivery import deliver


@contextmanager
def get_tensors_parallel(
    tensor: torch.Tensor,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    limit_s: float | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Every rank's tensor on the first of `ranks`, in the order of `ranks`; an empty list on the others.

    Called by all of `ranks` (global ranks; one is enough), which leave the body together. The list is emptied at
    the end; a tensor kept from it stays valid and keeps its memory. Tensors lie on the CPU, bit for bit; the first
    rank's own is not copied if it is there already. Threads that gather at the same time need a `group` each.

    Args:
        tensor: any dense tensor; same dtype and shape on all ranks.
        ranks: the same on all of them.
        group: a process group of exactly these ranks (None: the default group). It carries no traffic.
        limit_s: how long a rank waits for the others at each step (None: NOGATHER_WAIT_LIMIT_S, or six hours).
            Whoever does not come in time is named. To write, to read all and to run the body must take less.

    Raises:
        UserError: dtype or shape differs (names the ranks), or an argument is wrong.
        RankError: a rank failed, here or in the body, or did not come. The same error on all ranks, as UserError.
    """
    name = "get_tensors_parallel"
    control = Control.of(ranks, group, limit_s=limit_s, step=name)
    with control.together(name):
        tensors = [item.detach().cpu() for item in deliver(control, name, tensor, ranks, None, alike=True)]
        try:
            yield tensors
        finally:
            tensors.clear()


@contextmanager
def get_configs_parallel(
    config: Any,
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    workspace_path: Path | str | None = None,
    *,
    limit_s: float | None = None,
) -> Iterator[list[Any]]:
    """Every rank's config on the first of `ranks`, in the order of `ranks`; an empty list on the others.

    Called by all of `ranks` (global ranks; one is enough), which leave the body together. The list is emptied at
    the end; a tensor kept from it stays valid and keeps its memory. The first rank's own config is the object it
    gave; tensors of the others lie on the CPU, bit for bit. Threads that gather at the same time need a `group` each.

    Args:
        config: None, which keeps its place in the list; or dicts, lists, tuples and dataclasses (of classes that
            the first rank has imported) with dense tensors anywhere inside. Ranks may give different keys.
        ranks: the same on all of them.
        group: a process group of exactly these ranks (None: the default group). It carries no traffic.
        workspace_path: a folder that all ranks see. None: shared memory; the network between hosts.
        limit_s: as in `get_tensors_parallel`.

    Raises:
        UserError: a value cannot be sent (names its path), an argument is wrong, or there is no room.
        RankError: a rank failed, here or in the body, or did not come. The same error on all ranks, as UserError.
    """
    name = "get_configs_parallel"
    control = Control.of(ranks, group, limit_s=limit_s, step=name)
    with control.together(name):
        configs = deliver(control, name, config, ranks, Path(workspace_path) if workspace_path is not None else None)
        try:
            yield configs
        finally:
            configs.clear()
