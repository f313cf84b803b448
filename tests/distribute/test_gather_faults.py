"""Gathers when a rank raises, is killed or is stopped, at every step: one error for all, in time, nothing left."""

import threading
import time
from functools import partial

import pytest
import torch

from distribute import delivery, get_configs_parallel, get_tensors_parallel
from distribute.control import Control
from tests.distribute.scenarios import die, run_scenarios

ALL = [0, 1, 2]
STOP_LIMIT_S = 2.0  # as a caller sets it
#: Which rank fails, by step: before the call; the same after it has met the others; with its segment written; on the
#: first rank, before it opens one; in the body.
VICTIMS = {"before": 1, "connected": 2, "written": 1, "reading": 0, "body": 2}


def gather(rank, sign, step):
    """Rank VICTIMS[step] fails at a step of a gather."""
    fault = partial(die, sign) if rank == VICTIMS[step] else lambda: None
    if step != "before":
        Control.of(ALL).exchange("connect")
    if step in ("before", "connected"):
        fault()
    if step == "written":
        write = delivery.write_segment
        delivery.write_segment = lambda *args: (write(*args), fault())[0]
    if step == "reading":
        read = delivery.map_segment
        delivery.map_segment = lambda *args: (fault(), read(*args))[1]
    limit_s = STOP_LIMIT_S if sign == "stop" or step == "before" else None
    with get_tensors_parallel(torch.full((1000,), rank), ALL, limit_s=limit_s) as tensors:
        if step == "body":
            fault()
            time.sleep(0.1)
        assert len(tensors) == (3 if rank == 0 else 0)
    return "no fault"


SCENARIOS = [f"{sign}_{step}" for step in VICTIMS for sign in ("raise", "kill", "stop")]
for _name in SCENARIOS:
    globals()[_name] = lambda rank, folder, _name=_name: gather(rank, *_name.split("_"))


def all_killed(rank, folder):
    """A run of which nobody is left to take the segments away."""
    Control.of(ALL).exchange("connect")
    if rank == 0:
        threading.Timer(0.4, die, ["kill"]).start()
    write = delivery.write_segment
    delivery.write_segment = lambda *args: (write(*args), time.sleep(1), die("kill"))[0]
    with get_tensors_parallel(torch.full((1000,), rank), ALL):
        pass


def next_run(rank, folder):
    """Nothing of the runs before is in the way; keys may differ."""
    found = {"tensors": [], "configs": []}
    with get_tensors_parallel(torch.full((1000,), rank), ALL) as tensors:
        found["tensors"] = [int(tensor.unique()) for tensor in tensors]
    experts = {f"experts.{number}": torch.tensor(number) for number in (2 * rank, 2 * rank + 1)}
    shared = {"norm": torch.ones(8)} if rank else {}  # the first rank lacks one
    with get_configs_parallel(experts | shared, ALL, None) as configs:
        for config in configs:
            assert all(int(tensor) == int(name[-1]) for name, tensor in config.items() if name != "norm")
        found["configs"] = [sorted(config) for config in configs]
    return found


def slow_writer(rank, folder):
    """A rank writes for longer than the limit of the caller's compute group."""
    if rank == 1:
        write = delivery.write_segment
        delivery.write_segment = lambda *args: (time.sleep(3), write(*args))[1]
    return next_run(rank, folder)


def raises_and_goes_on(rank, folder):
    """A rank that raised before it came lives on and never comes."""
    if rank == 1:
        time.sleep(4)
        return "never came"
    return gather(rank, "stop", "before")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    names = [*SCENARIOS, "slow_writer", "raises_and_goes_on", "all_killed", "next_run"]
    return run_scenarios(__name__, names, 3, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank_learns_who_failed(results, name):
    sign, step = name.split("_")
    victim = VICTIMS[step]
    survivors = [result for rank, result in enumerate(results[name]) if rank != victim]
    assert survivors[0]["error"] == survivors[1]["error"]
    assert f"failed on rank {victim}: " in survivors[0]["error"]
    assert all(result["seconds"] < STOP_LIMIT_S + 4 for result in survivors)
    if sign != "raise":
        assert results[name][victim] is None
    elif step in ("before", "connected"):
        assert results[name][victim]["error"] == "OSError: the fault"
    else:
        assert results[name][victim]["error"] == survivors[0]["error"]
        assert survivors[0]["error"].endswith(f"failed on rank {victim}: OSError: the fault")


def test_a_rank_that_never_comes_is_named_though_it_lives(results):
    first, absent, third = results["raises_and_goes_on"]
    assert first["error"] == third["error"]
    assert first["error"].endswith("failed on rank 1: did not come to 'get_tensors_parallel' within 2 s")
    assert absent["value"] == "never came"


@pytest.mark.parametrize("name", ["slow_writer", "next_run"])
def test_gathers_after_faults_and_with_a_slow_writer(results, name):
    first, second, third = (result["value"] for result in results[name])
    assert first["tensors"] == ALL
    assert first["configs"] == [
        ["experts.0", "experts.1"],
        ["experts.2", "experts.3", "norm"],
        ["experts.4", "experts.5", "norm"],
    ]
    assert second == third == {"tensors": [], "configs": []}
