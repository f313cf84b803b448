"""Starts the ranks of one stage under torchrun, follows their logs, and ends with either a record or an error.

Call `run_ranks` from the main thread. The supervisor (supervisor.py) holds the processes; what ties them to this
one is the write end of its stdin: whatever happens here, be it a cancelled flow, Ctrl-C or SIGKILL, the pipe closes
and the tree ends. Ranks write to files, never to a pipe of this process. No torch here, and no Prefect.

The stage's folder afterwards:  exit.json  logs/rank-<r>.log  logs/launcher.log  logs-previous/ (of the run before)
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distribute.errors import BY_NAME, LaunchError, NogatherError, RankError
from infra import supervisor
from infra.follow import LogFollower, OnLine, follow

POLL_S = 0.2
END_LIMIT_S = 9.0  # how long to wait for a tree that was told to end; the supervisor needs about 5 s at worst
TORCHRUN_GRACE_S = 3  # torchrun's own wait between SIGTERM and SIGKILL, less than the supervisor's

# What a scheduler or another torchrun says about *its* ranks, and what torchrun would take as options.
RANK_VARIABLES = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "NODE_RANK MASTER_ADDR MASTER_PORT PYTHON_EXEC".split()
)
RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_ELASTIC_", "PET_", "SLURM_", "PMI_", "PMIX_", "PRTE_", "OMPI_", "MPI_",
                 "MV2_", "HYDRA_", "PALS_", "FLUX_", "JSM_", "LSB_")  # fmt: skip
# Ranks use no network: they get no secret that could end up in a log.
SECRET_VARIABLES = frozenset(
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN".split()
)
SECRET_PREFIXES = ("PREFECT_",)

# A rank's whole output, the interpreter's and C++'s included, goes to its file; its exit code to another one, since
# torchrun waits 30 s for the other ranks before it tells. $0 is the folder of logs.
_RANK_SHELL = '"$@" >"$0/rank-$RANK.log" 2>&1; code=$?; echo $code >"$0/rank-$RANK.exit"; exit $code'


@dataclass(frozen=True)
class RankCommand:
    """What the ranks of one stage run."""

    args: Sequence[str]  # after `python`: ("-m", "distribute.worker", "/…/job.json")
    folder: Path  # the stage's folder: logs, progress, errors, exit.json
    nproc: int = 1  # ranks on this host
    threads: int = 1  # OMP_NUM_THREADS of each
    env: Mapping[str, str] = field(default_factory=dict)  # added last

    def log(self, rank: int) -> Path:
        """The file with everything a rank wrote."""
        return self.folder / "logs" / f"rank-{rank}.log"

    @property
    def launcher_log(self) -> Path:
        """The file with what torchrun itself wrote."""
        return self.folder / "logs" / "launcher.log"


@dataclass(frozen=True)
class RankFailure:
    """What a failing rank wrote into error-<r>.json. `time` is seconds since the epoch."""

    rank: int
    type: str
    message: str
    kind: str = "internal"  # or "user"
    traceback: str = ""
    time: float = 0.0


def default_nproc() -> int:
    """Accelerators that the ranks may use, else the cores, at most 2."""
    raise NotImplementedError


def make_torchrun_argv(command: RankCommand) -> list[str]:
    """The whole command line. Pure."""
    raise NotImplementedError


def make_environment(base: Mapping[str, str], command: RankCommand) -> dict[str, str]:
    """`base` without other launchers' variables and secrets, with ours. Pure."""
    raise NotImplementedError


def read_failures(folder: Path) -> list[RankFailure]:
    """All error-<r>.json of a stage's folder; files that cannot be read are left out."""
    raise NotImplementedError


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The one that happened first. Pure."""
    raise NotImplementedError


def as_error(failure: RankFailure) -> NogatherError:
    """The error a rank raised, of its own class where that is one of ours, else LaunchError. Pure."""
    raise NotImplementedError


def run_ranks(
    command: RankCommand,
    *,
    deadline_s: float | None = None,
    stall_s: float | None = None,
    on_line: OnLine = lambda rank, text: None,
    on_tick: Callable[[], None] = lambda: None,
    lock_fd: int | None = None,
) -> supervisor.Exit:
    """Run the ranks to their end; call from the main thread.

    Args:
        command: what to run.
        deadline_s: end the ranks after this many seconds.
        stall_s: end them when no progress-<r>.json changed for so long.
        on_line: called with (rank, text) for lines of the ranks' logs; at most about 500 in all.
        on_tick: called about five times a second.
        lock_fd: an open descriptor that holds a flock. The supervisor keeps it, so the lock lasts until no rank
            lives, even if this process dies. Close the descriptor afterwards; LOCK_UN would free it for everyone.

    Returns:
        The record in exit.json, of a run that finished.

    Raises:
        NogatherError: of the class the first failing rank raised (a UserError above all), if it is one of ours.
        LaunchError: everything else; names the reason, the first failing rank, the last line of its traceback and
            the full log. The last lines of that log are attached as a note.
    Any exception, also one of a callback, ends the ranks before it leaves this function, within 10 s.
    """
    raise NotImplementedError
