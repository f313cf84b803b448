"""Helpers of the process tests: the fake launcher's tree, and whether anything of it is left."""

import time
from collections.abc import Callable
from pathlib import Path

from infra.supervisor import SEGMENT, processes

FAKE = Path(__file__).with_name("fake_torchrun.py")
TREE_SIZE = 5  # a launcher, two ranks, two grandchildren


def wait_for(condition: Callable[[], bool], *, seconds: float = 20) -> bool:
    """Whether the condition became true in time."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def tree_pids(folder: Path) -> set[int]:
    """The pids that the fake launcher's processes have noted so far."""
    return {int(path.name) for path in folder.glob("pids/*")}


def wait_for_tree(folder: Path) -> set[int]:
    """All pids of the fake launcher's tree, once it stands."""
    assert wait_for(lambda: len(tree_pids(folder)) == TREE_SIZE), "the fake launcher did not start"
    return tree_pids(folder)


def living(pids: set[int]) -> set[int]:
    """Those that still run (zombies do not)."""
    table = processes()
    return {pid for pid in pids if pid in table and table[pid].lives}


def segments(pids: set[int]) -> list[str]:
    """Shared-memory names of these processes."""
    found = [(path.name, SEGMENT.fullmatch(path.name)) for path in Path("/dev/shm").glob("nogather-*")]
    return [name for name, match in found if match and int(match[3]) in pids]
