"""How far a stage is: the ranks' progress files, summed, told to whoever listens.

The listener is set by the command line (bars or lines) and is never needed: without one, nothing is told.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class State:
    """How far a stage is, over all ranks. `unit` is "token layers", "bytes" or "tensors"."""

    stage: str
    label: str
    done: int
    total: int
    unit: str


Listener = Callable[[State], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While open, `listener` is told about every stage that runs in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(state: State) -> None:
    """Tell the listener, if there is one."""
    if listener := _listener.get():
        listener(state)


def read_state(stage: str, folder: Path) -> State | None:
    """The sum of all progress-<r>.json in a stage's folder; None before the first one.

    Ranks may be at different steps: only those at the step of the slowest rank are summed.
    """
    states = [state for path in sorted(folder.glob("progress-*.json")) if (state := _read(path))]
    if not states:
        return None
    label = min(states, key=lambda state: state["done"] / max(1, state["total"]))["label"]
    same = [state for state in states if state["label"] == label]
    return State(
        stage,
        label,
        done=sum(state["done"] for state in same),
        total=sum(state["total"] for state in same),
        unit=same[0]["unit"],
    )


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # only a display: being rewritten, or gone
