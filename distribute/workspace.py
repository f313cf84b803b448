"""The shared folder through which ranks of all hosts hand each other their state.

No method uses a collective or a barrier: the caller synchronises. Where a process group exists, a writer leaves the
checksum of its state file (`state_file.py`) in the group's store, so a reader knows whether a file is to come, waits
out the attribute cache of NFS, and never takes an old file for the new one. Names carry the job, so jobs that share
a folder do not meet; a job removes what others left when they have surely ended.
"""

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distribute.errors import WorkspaceError
from distribute.nested import refuse_non_json
from distribute.segments import FOREIGN_LIMIT_S, collect_dead, is_left_over, new_name
from distribute.state_file import (
    VISIBLE_LIMIT_S,
    as_workspace_error,
    await_state,
    make_private_folder,
    read_metadata,
    read_state,
    write_state,
)

JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


class NFSWorkspace:
    """State exchange between ranks of all hosts through one folder, which several jobs may share.

    The job is known by torchrun's run id and master address; without torchrun by the process group; without one by
    MASTER_ADDR and MASTER_PORT. With none of these, give every job a folder of its own. A state written before
    the process group was made is found afterwards under torchrun only.

    Args:
        workspace_path: a folder all ranks see under the same path; made here, private to the user, if it is not
            there. This rank's earlier state is removed, and that of jobs that have ended: on this host when the
            processes that wrote it and their parents ended. None: not initialised, shared memory is to be used.
        visible_limit_s: how long a read waits for a file that its writer has announced.
        leftover_limit_s: age at which files of jobs on other hosts count as left by a job that has ended.
    """

    def __init__(
        self,
        workspace_path: Path | str | None = None,
        *,
        visible_limit_s: float = VISIBLE_LIMIT_S,
        leftover_limit_s: float = FOREIGN_LIMIT_S,
    ):
        self.path = Path(workspace_path) if workspace_path is not None else None
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        self.visible_limit_s = visible_limit_s
        self._writes = 0
        if self.path is not None:
            make_private_folder(self.path)
            collect_dead(self.path, leftover_limit_s)
            _collect_states(self.path, leftover_limit_s)
            self._announce(self.rank, "")
            with as_workspace_error(self.path):
                self._state_path(self.rank).unlink(missing_ok=True)

    @property
    def is_initialized(self) -> bool:
        """Whether a folder was given."""
        return self.path is not None

    def write_configs_and_weights(self, config_json: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Replace this rank's state. Any rank, at any time.

        Args:
            config_json: JSON values only.
            weights: dense tensors of any safetensors dtype, shape, strides and device, by any name.

        Raises:
            ValueError: not initialised; or a value cannot be stored faithfully (names its path).
            WorkspaceError: the folder cannot be written or has no room.
        """
        path = self._state_path(self.rank)
        if not isinstance(config_json, dict):
            raise WorkspaceError(f"config_json is a {type(config_json).__name__}; give a dict of JSON values")
        refuse_non_json(config_json, "config_json")
        self._writes += 1
        metadata = {
            "config": json.dumps(config_json),
            "rank": str(self.rank),
            "run": _run_ids()[0],
            "generation": str(self._writes),
            "owners": json.dumps([new_name(), _parent_name()]),
        }
        self._announce(self.rank, write_state(path, weights, metadata))

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any] | None, dict[str, torch.Tensor] | None]:
        """(config, weights on the CPU) of another rank, or of this one; (None, None) when it wrote nothing.

        Raises:
            ValueError: not initialised; or no such rank.
            WorkspaceError: the file is damaged, or announced and not seen within the limit.
        """
        path = self._state_path(target_rank)
        announced = self._announced(target_rank)
        if announced == "":
            return None, None
        if announced:
            # The checksum is asked for anew each time: the writer may write again meanwhile.
            metadata, weights = await_state(
                path,
                lambda: self._announced(target_rank) or "",
                f"the state of rank {target_rank}",
                self.visible_limit_s,
            )
            return json.loads(metadata["config"]), weights
        with as_workspace_error(path):
            try:
                metadata, weights = read_state(path)
            except FileNotFoundError:
                return None, None
        return (json.loads(metadata["config"]), weights) if metadata.get("run") in _run_ids() else (None, None)

    def _state_path(self, rank: int) -> Path:
        if self.path is None:
            raise WorkspaceError("NFSWorkspace is not initialized: it was made without a workspace_path")
        world = dist.get_world_size() if dist.is_initialized() else None
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 or (world is not None and rank >= world):
            allowed = f"0 to {world - 1}" if world is not None else "0 and more"
            raise WorkspaceError(f"there is no rank {rank!r}; allowed are ranks {allowed}")
        return self.path / _state_name(rank)

    def _announce(self, rank: int, checksum: str) -> None:
        if (store := _store()) is not None:
            store.set(self._key(rank), checksum)

    def _announced(self, rank: int) -> str | None:
        """Checksum of the rank's latest write, "" when it wrote nothing; None when there is no store that knows."""
        if (store := _store()) is None or not store.check([self._key(rank)]):
            return None
        return store.get(self._key(rank)).decode()

    def _key(self, rank: int) -> str:
        return f"nogather/workspace/{os.path.abspath(self.path or '')}/{rank}"


def _store() -> Any:
    world = dist.group.WORLD if dist.is_initialized() else None
    return world.get_group_store() if world is not None else None


def _parent_name() -> str:
    """The process that started the ranks: a rank may end before others read its state. Init tells nothing."""
    parent = os.getppid()
    return new_name(parent) if parent > 1 else "unknown"


def _state_name(rank: int | str) -> str:
    return f"rank_{rank}_state-{_job_id()}.safetensors"


def _job_id() -> str:
    """The same on all ranks of a job, with no word between them; of other jobs another one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and (run := _store_run_id()):
        return run[:16]
    return hashlib.sha256(repr([os.environ.get(name) for name in JOB_VARIABLES]).encode()).hexdigest()[:16]


def _run_ids() -> list[str]:
    """Ids of this run of the job, the strictest first: a state with any of them is this run's."""
    started = f"{_job_id()}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return [run, started] if (run := _store_run_id()) else [started]


def _store_run_id() -> str | None:
    """The same on all ranks of a process group, and in no other one."""
    store = _store()
    return store.compare_set("nogather/run", "", secrets.token_hex(16)).decode() if store is not None else None


def _collect_states(folder: Path, limit_s: float) -> None:
    """Remove states that other jobs left."""
    for path in set(folder.glob("rank_*_state-*.safetensors")) - set(folder.glob(_state_name("*"))):
        with contextlib.suppress(OSError):  # another rank was faster, or the file belongs to another user
            try:
                owners = json.loads(read_metadata(path)["owners"])
            except (ValueError, KeyError):
                owners = []
            if is_left_over(path, owners, limit_s):
                path.unlink()
