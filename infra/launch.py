"""Starts the ranks of one stage under torchrun, follows their logs, and ends with either a record or an error.

Call `run_ranks` from the main thread. The supervisor (supervisor.py) holds the processes; what ties them to this
one is the write end of its stdin: whatever happens here, be it a cancelled flow, Ctrl-C or SIGKILL, the pipe closes
and the tree ends. Ranks write to files, never to a pipe of this process. No torch here, and no Prefect.

The stage's folder afterwards:  exit.json  logs/rank-<r>.log  logs/launcher.log  logs-previous/ (of the run before)
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from distribute.errors import LaunchError, NogatherError
from infra import supervisor
from infra.failure import RankFailure, as_error, explain_end, find_failure
from infra.follow import OnLine, follow, read_tail
from infra.supervisor import ExitRecord

log = logging.getLogger(__name__)

POLL_S = 0.2
END_LIMIT_S = 9.0  # how long to wait for a tree that was told to end; the supervisor needs about 5 s at worst
TORCHRUN_GRACE_S = 3  # torchrun's own wait between SIGTERM and SIGKILL, less than the supervisor's

# What a scheduler or another torchrun says about *its* ranks, and what torchrun would take as options.
RANK_VARIABLES = frozenset((
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHON_EXEC",
))  # fmt: skip
RANK_PREFIXES = (
    "TORCHELASTIC_", "TORCH_ELASTIC_", "PET_", "SLURM_", "PMI_", "PMIX_", "PRTE_", "OMPI_", "MPI_", "MV2_",
    "HYDRA_", "PALS_", "FLUX_", "JSM_", "LSB_",
)  # fmt: skip
# Ranks use no network: they get no secret that could end up in a log.
SECRET_VARIABLES = frozenset((
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
))  # fmt: skip
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


def default_nproc() -> int:
    """Ranks to start when nobody says: the accelerators they may use, else the cores they may use, at most 2."""
    return count_accelerators(os.environ) or min(2, len(os.sched_getaffinity(0)))


def count_accelerators(environment: Mapping[str, str]) -> int:
    """GPUs of this host that CUDA_VISIBLE_DEVICES allows; asks the driver's tool or looks into /dev, not torch."""
    tool = shutil.which("nvidia-smi")
    present = 0
    if tool:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
        present = sum(line.startswith("GPU ") for line in listing.splitlines())
    present = present or sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))


def make_torchrun_argv(command: RankCommand, *, python: str = sys.executable) -> list[str]:
    """torchrun on this host with ranks that write to their own files. Pure.

    `--standalone` lets the kernel choose the port of torchrun's own store, which the ranks then share, so that two
    jobs cannot collide; `-P` keeps a user's folder from shadowing our packages.
    """
    torchrun = [python, "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    shape = [f"--nproc-per-node={command.nproc}", "--max-restarts=0", f"--log-dir={os.devnull}", "--no-python"]
    rank = ["/bin/sh", "-c", _RANK_SHELL, str(command.folder / "logs"), python, "-P", "-u", *command.args]
    return [*torchrun, *shape, *rank]


def make_environment(base: Mapping[str, str], command: RankCommand) -> dict[str, str]:
    """`base` without other launchers' variables and without secrets, with ours. Pure."""
    kept = {
        name: value
        for name, value in base.items()
        if name not in RANK_VARIABLES | SECRET_VARIABLES and not name.startswith(RANK_PREFIXES + SECRET_PREFIXES)
    }
    ours = {"OMP_NUM_THREADS": str(command.threads), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(TORCHRUN_GRACE_S)}
    # One host: gloo needs no outside address, and ranks fetch nothing.
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**defaults, **kept, **ours, **command.env}


def run_ranks(
    command: RankCommand,
    *,
    deadline_s: float | None = None,
    stall_s: float | None = None,
    on_line: OnLine = lambda rank, text: None,
    on_tick: Callable[[], None] = lambda: None,
    lock_fd: int | None = None,
) -> ExitRecord:
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
        What exit.json says of a run that finished.

    Raises:
        NogatherError: of the class the first failing rank raised (a UserError above all), if it is one of ours.
        LaunchError: everything else; names the reason, the first failing rank, the last line of its traceback and
            the full log. The last lines of that log are attached as a note (`__notes__`).

    Any exception, also one raised by a callback or a signal handler, ends the ranks before it leaves this function,
    within 10 s.
    """
    _clear(command)
    followers = follow({rank: command.log(rank) for rank in range(command.nproc)}, on_line)
    with _supervised(command, deadline_s=deadline_s, stall_s=stall_s, lock_fd=lock_fd) as process:
        while process.poll() is None:
            for follower in followers.values():
                follower.poll()
            on_tick()
            time.sleep(POLL_S)
    record = _read_record(command)
    failure = find_failure(command.folder, record)
    for rank, follower in followers.items():
        follower.close(show_tail=failure is not None and failure.rank == rank and failure.kind != "user")
    on_tick()
    if record.reason != "finished":
        raise _make_error(command, record, failure)
    return record


@contextmanager
def _supervised(
    command: RankCommand, *, deadline_s: float | None, stall_s: float | None, lock_fd: int | None
) -> Iterator[subprocess.Popen]:
    """The running supervisor; on leaving, however that comes about, its tree is gone."""
    limits = [("--deadline", deadline_s), ("--stall", stall_s), ("--lock-fd", lock_fd)]
    options = [text for name, value in limits if value is not None for text in (name, str(value))]
    program = [sys.executable, "-I", "-S", supervisor.__file__, "--folder", str(command.folder), *options, "--"]
    with command.launcher_log.open("wb") as launcher_log:
        process = subprocess.Popen(
            [*program, *make_torchrun_argv(command)],
            stdin=subprocess.PIPE,
            stdout=launcher_log,
            stderr=launcher_log,
            env=make_environment(os.environ, command),
            pass_fds=() if lock_fd is None else (lock_fd,),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        assert process.stdin
        process.stdin.close()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            # It goes on trying, and keeps the stage's lock: only a process stuck in the kernel takes so long.
            log.error("processes of the stage in %s do not end; supervisor: %d", command.folder, process.pid)


def _read_record(command: RankCommand) -> ExitRecord:
    path = command.folder / "exit.json"
    if not path.exists():
        raise LaunchError(f"the supervisor died before its ranks; full log: {command.launcher_log}")
    return ExitRecord(**json.loads(path.read_text(encoding="utf-8")))


def _make_error(command: RankCommand, record: ExitRecord, failure: RankFailure | None) -> NogatherError:
    """The error of a run that did not finish, with the last lines of the log that matters as a note."""
    if failure is None:
        path, whose = command.launcher_log, "torchrun's log"
        error: NogatherError = LaunchError(f"{explain_end(command.folder, record)}; logs: {path.parent}")
    else:
        path, whose = command.log(failure.rank), f"the log of rank {failure.rank}"
        error = as_error(failure, path)
    told_all = failure is not None and failure.kind == "user"  # one clear sentence; a traceback would hide it
    if not told_all and (lines := read_tail(path)):
        error.add_note("\n".join([f"The last lines of {whose} ({path}):", *lines]))
    return error


def _clear(command: RankCommand) -> None:
    """Remove what an earlier run left, so that it cannot be taken for this one's; its logs are kept once."""
    folder = command.folder
    logs, previous = folder / "logs", folder / "logs-previous"
    if logs.exists():
        shutil.rmtree(previous, ignore_errors=True)
        logs.rename(previous)
    logs.mkdir(parents=True)
    for pattern in ("exit.json", "error-*.json", "progress-*.json"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
