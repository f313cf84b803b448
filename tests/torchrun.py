"""Run a function of a test module on every rank of a real torchrun job and collect what each rank returns.

    # in tests/distribute/test_x.py
    def sums(scale):                        # runs on each rank; arguments and result are JSON
        with Ranks.start() as ranks:
            return {"sum": ..., "rank": ranks.rank}

    def test_sums():
        results = run_ranks(sums, 2, 10)    # [{"sum": ...}, {"sum": ...}] in the order of ranks

A rank that raises fails the test with all tracebacks; with `check=False` its result is
{"error": class name, "text": message} instead, and a rank that never reported (killed) gives {"error": "lost"}.
A job that exceeds `timeout` is ended, with every process it started, and fails the test. `left_segments()` lists
what remains of ours in /dev/shm.

Ranks compute with one thread. Importing torch costs about three seconds a job, so let one job check several things.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOG_LINES = 60
#: torch's store asks the DNS for the name of every client, and waits five seconds when that does not answer.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RES_OPTIONS": "timeout:1 attempts:1"}


def run_ranks(
    function: Callable[..., Any] | str,
    nproc: int,
    *args: Any,
    timeout: float = 90,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    during: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> list[Any]:
    """What `function(*args)` returns on each of `nproc` ranks.

    Args:
        function: a module-level function, or its address "package.module:name".
        prefix: a command to run torchrun under, for example ("unshare", "-rm", ...).
        during: called with the torchrun process once it runs, for example to kill something.
    """
    address = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory() as folder:
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(nproc), "-m", "tests.torchrun", address, json.dumps(args), folder]
        environment = os.environ | ENVIRONMENT | dict(env or {})
        log = Path(folder, "log")
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            if during is not None:
                during(process)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{address} did not end in {timeout} s\n{_tail(log)}") from None
        finally:
            end_tree(process)
        results = [_read(Path(folder, f"{rank}.json")) for rank in range(nproc)]
        failed = [result for result in results if isinstance(result, dict) and "error" in result]
        if check and failed:
            reports = "\n".join(str(result.get("traceback", result)) for result in failed)
            raise AssertionError(f"{address} failed:\n{reports}\n{_tail(log)}")
        return results


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks. Each rank is a session leader, so killing torchrun's group would not reach them."""
    ranks = descendants(process.pid)
    for pid in [process.pid, *ranks] if process.poll() is None else ranks:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def descendants(pid: int) -> list[int]:
    """Process ids of all living children of a process, and of theirs."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def left_segments() -> list[str]:
    """Names of this project's segments in /dev/shm."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith("nogather-"))


def wait_until(condition: Callable[[], Any], limit_s: float = 60, what: str = "the condition") -> Any:
    """The first true value of `condition()`; fails after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {limit_s} s"
        time.sleep(0.05)
    return value


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {"error": "lost"}


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _main(address: str, arguments: str, folder: str) -> None:
    """One rank. It ends with code 0 even when the function raised, so that torchrun lets its peers report as well."""
    module, _, name = address.partition(":")
    try:
        result = getattr(import_module(module), name)(*json.loads(arguments))
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
    path = Path(folder, f"{os.environ['RANK']}.json")
    path.with_suffix(".tmp").write_text(json.dumps(result))
    path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    _main(*sys.argv[1:])
