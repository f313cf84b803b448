"""An export when a rank raises, is killed or is stopped, at every step.

The others get one error, in time; the folder holds the old checkpoint or the whole new one; the next export, by one
process, finds nothing in its way and leaves nothing.
"""

import os
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from distribute import channel
from distribute.control import Control
from distribute.live import collect, equal, folder, request, save, write
from tests.distribute.live import saved
from tests.distribute.scenarios import die, run_scenarios

LIMITS_S = {"raise": 30.0, "kill": 30.0, "stop": 3.0}  # as a caller sets them
LEEWAY_S = 10.0
OLD, NEW, LATER = 1, 2, 3  # seeds


class Fault(NamedTuple):
    """At which call of a function a rank fails, before it or `after` it; `step` is what the error of a raise names."""

    step: str
    owner: Any
    name: str
    call: int = 1
    after: bool = False
    argument: str | None = None  # calls with another one do not count
    on: str = "every"  # rank: "first" or "other"


FAULTS = {
    "meeting": Fault("meeting", channel.Channel, "connect"),
    "arguments": Fault("read the arguments", request, "parse_size"),
    "read": Fault("read the model", save, "read_state"),
    "compare": Fault("export", save, "compare"),
    "replicas": Fault("read replicas", equal, "_digest"),
    "quantizers": Fault("read the quantizers", save, "read_quantized"),
    "measure": Fault("measure", collect, "_row_absmax"),
    "reduce": Fault("all_reduce_max", channel, "AllreduceOptions"),
    "plan": Fault("plan", save, "make_live_plan"),
    "stage": Fault("prepare", folder.Staging, "_clean_up", on="first"),
    "allocate": Fault("prepare", save, "preallocate", 2, on="first"),
    "see": Fault("prepare", save, "await_visible", on="other"),
    "seen": Fault("prepare", save, "await_visible", after=True, on="other"),
    "values": Fault("write", save, "write_values"),
    "rows": Fault("write", write, "write_range", 4),
    "cut": Fault("write", Control, "transfer", 2),
    "transfer": Fault("redistribute", channel.Channel, "_place", 2),
    "fsync": Fault("write", os, "fsync"),
    "seal": Fault("seal", save, "sha256"),
    "files": Fault("commit", save, "write_index", on="first"),
    "swap": Fault("commit", folder, "put_in_place", on="first"),
    "swapped": Fault("commit", folder, "put_in_place", after=True, on="first"),
    "commit": Fault("export", Control, "exchange", argument="commit"),
}
#: The new checkpoint is in place when the first rank comes there.
DONE = {"swapped", "commit"}
#: Nothing to fail in: one process has no peers.
NOT_ALONE = {"meeting", "replicas", "reduce", "cut", "transfer"}


def scenarios(sign: str, *victims: int, alone: bool = False) -> list[str]:
    """Names "sign_victim_step" of all that can fail so."""
    return [
        f"{sign}_{victim}_{step}"
        for step, fault in FAULTS.items()
        for victim in victims
        if fault.on in ("every", "other" if victim else "first")
        and not (alone and step in NOT_ALONE)
        # To others, a rank that fails before it has met them is one that does not come.
        and not (step == "meeting" and sign != "stop")
    ]


def alternating(names: list[str]) -> list[str]:
    """Of a step in which both ranks can fail, one, in turn."""
    other = {name: name.replace("_0_", "_1_") for name in names}
    every = [name for name in names if other[name] in names and other[name] != name]
    drop = {name if turn % 2 else other[name] for turn, name in enumerate(every)}
    return [name for name in names if name not in drop]


class Job(NamedTuple):
    """A torchrun job. `at_once` scenarios run at a time: those that stop a rank mostly wait."""

    placement: str
    at_once: int
    names: list[str]


JOBS = {
    1: Job("mixed", 1, [*scenarios("raise", 0, alone=True), *scenarios("kill", 0, alone=True)]),
    2: Job("mixed", 8, alternating(scenarios("stop", 0, 1))),
    3: Job("mixed", 3, [*scenarios("raise", 0, 2), *scenarios("kill", 0, 1)]),
    4: Job("fsdp_tp", 3, [*scenarios("kill", 3), "stop_1_transfer", "stop_0_rows"]),
}
CASES = [(world, name) for world, job in JOBS.items() for name in job.names]


def export(rank: int, place: Path, name: str) -> None:
    """One rank of a scenario."""
    sign, victim, step = name.split("_")
    os.environ["NOGATHER_WAIT_LIMIT_S"] = str(LIMITS_S[sign])
    world = int(os.environ["WORLD_SIZE"])
    if step != "meeting":  # a busy machine starts ranks seconds apart, which is not what the limit is for
        Control.of(range(world), limit_s=30).exchange("connect")
    if rank == int(victim):
        fail_at(FAULTS[step], sign)
    saved.save(place / name / "out", NEW, JOBS[world].placement, world)


def fail_at(fault: Fault, sign: str) -> None:
    function, calls = getattr(fault.owner, fault.name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += fault.argument is None or fault.argument in args
        if calls != fault.call:
            return function(*args, **kwargs)
        calls += 1  # once
        result = function(*args, **kwargs) if fault.after else None
        die(sign)
        return result if fault.after else function(*args, **kwargs)  # a rank that is not stopped for good

    setattr(fault.owner, fault.name, failing)


if "RANK" in os.environ:  # imports that transformers puts off would be repeated in every fork
    with tempfile.TemporaryDirectory() as _place:
        saved.save(Path(_place, "out"), NEW)
for _, _name in CASES:
    globals()[_name] = partial(export, name=_name)


class Done(NamedTuple):
    """`results` by world and scenario; `places`: folder of a world; `digests` by seed."""

    results: dict[int, dict[str, list[Any]]]
    places: dict[int, Path]
    digests: dict[int, dict[str, str]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("faults")
    digests = {seed: saved.make_checkpoint(root / str(seed), seed) for seed in (OLD, NEW, LATER)}
    results, places = {}, {world: root / f"world {world}" for world in JOBS}
    for world, job in JOBS.items():
        for name in job.names:
            shutil.copytree(root / str(OLD), places[world] / name / "out")
        results[world] = run_scenarios(__name__, job.names, world, places[world], at_once=job.at_once)
    return Done(results, places, digests)


@pytest.mark.parametrize(("world", "name"), CASES)
def test_all_learn_who_failed_and_the_folder_is_whole(done: Done, world: int, name: str) -> None:
    sign, victim, step = name.split("_")
    results, place = done.results[world][name], done.places[world] / name
    survivors = [result for rank, result in enumerate(results) if sign == "raise" or rank != int(victim)]
    for result in survivors:
        assert result["error"] == survivors[0]["error"]
        assert re.fullmatch(error_of(sign, int(victim), FAULTS[step]), result["error"])
        assert result["seconds"] < (LIMITS_S["stop"] if sign == "stop" else 0) + LEEWAY_S
    if sign != "raise":
        assert results[int(victim)] is None

    new = step in DONE and (victim == "0" or step == "commit")
    assert saved.digests(place / "out") == done.digests[NEW if new else OLD]
    if sign == "raise" or victim != "0":
        assert saved.names(place) == ["out"]
    elif FAULTS[step].step in ("write", "redistribute", "seal"):
        assert len(saved.names(place)) == 3  # the staging folder and the lock: what the next export has to remove

    saved.save(place / "out", LATER)
    assert saved.digests(place / "out") == done.digests[LATER]
    assert saved.names(place) == ["out"]


def error_of(sign: str, victim: int, fault: Fault) -> str:
    if sign == "kill":
        return f"RankError: .+ failed on rank {victim}: ended (before|in) '.+'"
    if sign == "stop":
        return f"RankError: .+ failed on rank {victim}: (did not come to|stopped in) '.+' (within|for) 3 s"
    if fault.owner is folder or fault.owner is folder.Staging:
        return "StageError: cannot write to export_dir .+/out: the fault"
    return f"RankError: {fault.step} failed on rank {victim}: OSError: the fault"


def test_every_step_has_a_fault() -> None:
    """So that a new step is not forgotten here."""
    source = Path(save.__file__).read_text() + Path(collect.__file__).read_text()
    assert set(re.findall(r'together\("(.+?)"\)', source)) <= {fault.step for fault in FAULTS.values()}
