"""Who is blamed when a rank ends, stops or is interrupted while others are elsewhere: that rank, and nobody else."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distribute import channel
from distribute.channel import Channel
from distribute.control import Control
from tests.distribute.scenarios import die, run_scenarios

ALL = [0, 1, 2]
SIZE = 1000


def control(limit_s: float = 20) -> Control:
    """Connected."""
    found = Control.of(ALL, limit_s=limit_s)
    found.exchange("connect")
    return found


def busy_elsewhere(rank: int, folder: Path) -> None:
    """Rank 0 computes for a while, rank 2 waits, rank 1 ends."""
    meet = control().exchange
    if rank == 1:
        die("kill")
    time.sleep(2 if rank == 0 else 0)
    meet("results")


def busy_after_a_transfer(rank: int, folder: Path) -> None:
    """Rank 0 has nothing to receive and goes on; rank 1 ends while rank 2 waits for its tensor."""
    transfer(rank, control(), "kill")


def ahead_of_a_transfer(rank: int, folder: Path) -> None:
    """The same with a rank that stops, and rank 0 waits at the next meeting."""
    transfer(rank, control(6), "stop", 0)


def transfer(rank: int, group: Control, sign: str, seconds: float = 3) -> None:
    if rank == 1:
        Channel._place = lambda *args: die(sign)  # it has come, and sends nothing
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    group.transfer("send", {2: tensor} if rank == 1 else {}, {1: tensor} if rank == 2 else {})
    time.sleep(seconds if rank == 0 else 0)
    group.exchange("next")


def interrupted(rank: int, folder: Path) -> None:
    """A user interrupts one rank, whose program goes on: the others must not wait for it."""
    group = control()
    if rank == 1:
        channel.AllgatherOptions = interrupt
    try:
        group.exchange("results")
    except KeyboardInterrupt:
        time.sleep(1)
        group.exchange("another")


def fails_in_a_collective(rank: int, folder: Path) -> None:
    group = control()
    if rank == 1:
        channel.AllgatherOptions = fail
    group.exchange("results")


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise MemoryError("no memory")


EXPECTED: dict[Callable[..., Any], str] = {
    busy_elsewhere: "results failed on rank 1: ended before 'results'",
    busy_after_a_transfer: "send failed on rank 1: ended in 'send'",
    # Whose limit ends first, finds out.
    ahead_of_a_transfer: "(send failed on rank 1: stopped in 'send' for|next failed on rank 1: did not come to 'next' within) 6 s",
    interrupted: "results failed on rank 1: KeyboardInterrupt",
    fails_in_a_collective: "results failed on rank 1: MemoryError: no memory",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    names = [function.__name__ for function in EXPECTED]
    return run_scenarios(__name__, names, 3, tmp_path_factory.mktemp("blame"), at_once=5)


@pytest.mark.parametrize("name", [function.__name__ for function in EXPECTED])
def test_only_the_rank_that_failed_is_blamed(results: dict[str, list[Any]], name: str) -> None:
    expected = next(text for function, text in EXPECTED.items() if function.__name__ == name)
    survivors = [result for result in results[name] if result is not None]
    assert len(survivors) == (2 if "busy" in name or "ahead" in name else 3)
    (error,) = {result.get("error") for result in survivors}
    assert re.fullmatch(f"RankError: {expected}", str(error))
    assert max(result["seconds"] for result in survivors) < 30
