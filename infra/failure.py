"""Says why the ranks of a stage failed: which of them was first, and which error that makes here.

A rank that raises leaves error-<r>.json (distribute/worker.py); one that dies without a word leaves only its exit
code (supervisor.py). The others fail because of it, a moment later, with messages about lost connections.
"""

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distribute.errors import BY_NAME, LaunchError, NogatherError
from infra.supervisor import ExitRecord


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure. `time` is seconds since the epoch, by the clock of the file system."""

    rank: int
    message: str
    type: str = ""  # class of the exception; empty when the rank left none
    kind: str = "internal"  # or "user"
    traceback: str = ""
    time: float = 0.0

    @property
    def last_line(self) -> str:
        """What a traceback ends with, or the message."""
        lines = [line for line in self.traceback.splitlines() if line.strip()]
        return lines[-1] if lines else ": ".join(filter(None, (self.type, self.message)))


def read_failures(folder: Path) -> list[RankFailure]:
    """What the ranks wrote into error-<r>.json; files that cannot be read are left out."""
    failures = []
    for path in sorted(folder.glob("error-*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = json.loads(path.read_text(encoding="utf-8"))
            texts = {name: str(value[name]) for name in ("type", "message", "kind", "traceback")}
            failures.append(RankFailure(rank=int(value["rank"]), time=path.stat().st_mtime, **texts))
    return failures


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """The one that happened first. Pure.

    Ranks that agree on an error all raise it at about the same time: of these, the one with the longest traceback,
    which shows the cause.
    """
    if not failures:
        return None
    first = min(failures, key=lambda failure: (failure.time, failure.rank))
    agreed = [failure for failure in failures if (failure.type, failure.message) == (first.type, first.message)]
    return max(agreed, key=lambda failure: len(failure.traceback))


def find_failure(folder: Path, record: ExitRecord) -> RankFailure | None:
    """The rank that failed first, with an exception or without one; None when none failed by itself."""
    if record.reason != "failed":
        return None
    failures = read_failures(folder)
    silent = record.first_failure
    if silent and silent["rank"] not in {failure.rank for failure in failures}:
        message = describe_exit(silent["exit_code"])
        failures.append(RankFailure(rank=silent["rank"], message=message, time=silent["time"]))
    return first_failure(failures)


def describe_exit(code: int) -> str:
    """ "exit code 3", "killed by SIGSEGV". Pure."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", often the kernel's, for want of memory" if name == "SIGKILL" else "")
    return f"killed by signal {-code}"


def as_error(failure: RankFailure, log: Path) -> NogatherError:
    """The error this failure makes here: of its own class where that is one of ours, else LaunchError. Pure."""
    if cls := BY_NAME.get(failure.type):
        return cls(failure.message)
    if failure.type == "RankError":  # its message names the ranks
        return LaunchError(f"{failure.message}; full log: {log}")
    return LaunchError(f"rank {failure.rank} failed: {failure.last_line}; full log: {log}")


def describe_progress(folder: Path) -> str:
    """How far each rank came, the slowest first: "rank 1: encode 4/10 tensors; rank 0: encode 10/10 tensors"."""
    parts = []
    for path in folder.glob("progress-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(path.read_text(encoding="utf-8"))
            done, total, rank = state["done"], state["total"], int(path.stem.removeprefix("progress-"))
            text = f"rank {rank}: {state['label']} {done}/{total} {state['unit']}"
            parts.append((done / max(total, 1), rank, text))
    return "; ".join(text for _, _, text in sorted(parts)) or "no rank reported any progress"


def explain_end(folder: Path, record: ExitRecord) -> str:
    """Why the ranks ended when none of them failed by itself: one sentence."""
    reasons = {
        "deadline": f"the ranks were ended after {record.seconds:.0f} s, the limit of this stage",
        "stalled": f"no rank made progress any more, so the ranks were ended after {record.seconds:.0f} s",
        "terminated": "the ranks were ended because their supervisor got SIGTERM",
        "interrupted": "the ranks were ended because their supervisor got SIGINT",
        "parent_gone": "the ranks were ended because their supervisor lost this process",
        "not_started": "torchrun could not be started",
    }
    if record.reason in reasons:
        return f"{reasons[record.reason]} ({describe_progress(folder)})"
    return f"torchrun failed: {describe_exit(record.exit_code or 0)}"
