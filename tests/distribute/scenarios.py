"""Many faults in one torchrun job: each scenario runs in forks of the ranks, which may be killed or stopped.

A start of torchrun costs seconds and ends with the first rank that dies; a fork costs milliseconds, and its parent
goes on. A forked rank joins a process group of the scenario over torchrun's own store. It reports to a file; so does
the parent of a victim, which ends it once its peers have reported.

    results = run_scenarios("tests.distribute.test_x", ["kill", "stop"], 3, tmp_path)
    results["kill"][0]      # what function `kill(rank, folder)` of that module returned or raised on rank 0
"""

import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distribute.segments import new_name
from tests.torchrun import left_segments, run_ranks, wait_until

LIMIT_S = 30
COMPUTE_LIMIT_S = 2


def run_scenarios(
    module: str,
    names: Sequence[str],
    world: int,
    folder: Path,
    prefix: tuple[str, ...] = (),
    at_once: int = 1,
) -> dict[str, list[Any]]:
    """By scenario, what each rank did: {"value"} or {"error"}, with "seconds"; None when it did not live to tell.

    `at_once` scenarios run at a time, for those that mostly wait. Fails when a process was left, when a file of ours was left in /dev/shm or in the folder for temporary files, or
    when a log tells of a resource tracker.
    """
    temporary = folder / "temporary"
    temporary.mkdir()
    left = run_ranks(
        _run, world, module, names, str(folder), at_once, timeout=120, env={"TMPDIR": str(temporary)}, prefix=prefix
    )
    assert left == [[]] * world, left
    assert "resource_tracker" not in "".join(log.read_text() for log in folder.glob("*.log"))
    return {name: [_read(folder, name, rank) for rank in range(world)] for name in names}


def die(sign: str) -> None:
    """End or stop this rank as the scenario's name says: raise, kill or stop."""
    if sign == "raise":
        raise OSError("the fault")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[sign])


def _run(module: str, names: list[str], folder: str, at_once: int) -> list[str]:
    """The parent on one rank; returns what is left after all scenarios."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    functions = import_module(module)
    gc.freeze()  # else the first collection in a fork copies the whole heap
    for first in range(0, len(names), at_once):
        batch = names[first : first + at_once]
        children = {name: _fork_rank(functions, name, rank, world, Path(folder)) for name in batch}
        for name, child in children.items():
            _await_child(child, [_report(Path(folder), name, peer) for peer in range(world) if peer != rank])
            (Path(folder) / f"{name}.{rank}.over").touch()
        for name in batch:
            for peer in range(world):
                over = Path(folder) / f"{name}.{peer}.over"
                wait_until(over.exists, LIMIT_S, f"the end of {name} on rank {peer}")
    job = new_name().split("-")[5]
    files = left_segments() + [path.name for path in Path(folder).rglob("nogather-*")]
    return [file for file in files if f"-{job}-" in file]


def _fork_rank(functions: Any, name: str, rank: int, world: int, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        _be_rank(functions, name, rank, world, folder)
    return child


def _await_child(child: int, peers: list[Path]) -> None:
    """A rank that stopped is ended when its peers are done; one that hangs, at the limit."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T" and all(peer.exists() for peer in peers):
            break
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _be_rank(functions: Any, name: str, rank: int, world: int, folder: Path) -> None:
    """A forked rank, which never returns."""
    log = os.open(folder / f"{name}.{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(force=True)
    started, report = time.monotonic(), {}
    try:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if store.add(f"{name}/came", 1) == world:
            store.set(f"{name}/all came", "")
        store.wait([f"{name}/all came"], timedelta(seconds=LIMIT_S))  # the limit below is short for a busy machine
        limit = timedelta(seconds=COMPUTE_LIMIT_S)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=limit
        )
        started = time.monotonic()
        report["value"] = getattr(functions, name)(rank, folder)
    except BaseException as error:
        report["error"] = f"{type(error).__name__}: {error}"
    finally:
        report["seconds"] = time.monotonic() - started
        path = _report(folder, name, rank)
        path.with_suffix(".tmp").write_text(json.dumps(report))
        path.with_suffix(".tmp").rename(path)
        sys.stderr.flush()
        os._exit(0)


def _report(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.json"


def _read(folder: Path, name: str, rank: int) -> Any:
    path = _report(folder, name, rank)
    return json.loads(path.read_text()) if path.exists() else None
