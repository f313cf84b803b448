"""Delivery between ranks of several hosts, large counts, and failures on the way over the network."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distribute import delivery, get_configs_parallel, get_tensors_parallel
from tests.distribute.scenarios import die, run_scenarios
from tests.distribute.test_state import assert_same, odd_tensors

ALL = [0, 1, 2]
COUNT = 20_000


def other_hosts(rank, folder):
    """Ranks 0 and 2 share a host; rank 1 is on another one, alone."""
    delivery.host = lambda: f"host {rank % 2}"
    delivery.CHUNK_BYTES = 1000
    found = {}
    with get_tensors_parallel(torch.arange(5001) + rank, [2, 1, 0]) as tensors:
        found["tensors"] = [[len(tensor), int(tensor[0]), int(tensor[-1])] for tensor in tensors]
    with get_configs_parallel(odd_tensors() if rank else None, ALL, None) as configs:
        for config in configs[1:]:
            assert_same(config, odd_tensors())
        found["configs"] = [config is None for config in configs]
    with get_configs_parallel({"rank": rank}, ALL, None) as configs:
        found["no data"] = list(configs)
    with get_configs_parallel({"rank": rank, "w": torch.ones(1)}, ALL, None, folder / "shared") as configs:
        found["folder"] = [config["rank"] for config in configs]
    return found


def own_temporary_folders(rank, folder):
    """Containers that share /dev/shm, have no room in it, and folders for temporary files of their own."""

    def move(path, nbytes):
        raise FileNotFoundError(2, "No such file or directory", str(path))

    delivery.map_segment = move
    with get_tensors_parallel(torch.full((1000,), rank), ALL) as tensors:
        return [int(tensor.unique()) for tensor in tensors]


def no_memory(rank, folder):
    """The first rank finds no memory for what is to come: nobody may begin to send."""
    delivery.host = lambda: f"host {rank}"
    if rank == 0:
        delivery.mmap = SimpleNamespace(mmap=no_mapping)
    with get_tensors_parallel(torch.ones(1000), ALL):
        pass


def no_mapping(*args):
    raise OSError(12, "Cannot allocate memory")


def killed_on_the_way(rank, folder):
    delivery.host = lambda: f"host {rank}"
    delivery.CHUNK_BYTES = 1000
    if rank == 2:
        transfer, calls = delivery.Control.transfer, []
        delivery.Control.transfer = lambda *args: (calls.append(1), len(calls) > 2 and die("kill"), transfer(*args))
    with get_tensors_parallel(torch.ones(5000), ALL):
        pass


def many_tensors(rank, folder):
    for workspace in (None, folder / "many"):
        config = {
            f"layers.{index}.weight_scale": torch.full((1 + index % 4,), index + rank) for index in range(COUNT)
        }
        with get_configs_parallel({"state": config}, ALL, None, workspace) as configs:
            for peer, other in enumerate(configs):
                assert list(other["state"]) == list(config)
                for index, tensor in enumerate(other["state"].values()):
                    assert tensor.tolist() == [index + peer] * (1 + index % 4)
    return "all right"


def in_threads(rank, folder):
    """Three threads with a group each begin in another order on each rank."""
    groups = [dist.new_group(ALL) for _ in ALL]
    found = [[] for _ in ALL]

    def work(index):
        time.sleep(0.02 * ((index + rank) % 3))
        for number in range(10):
            mine = torch.tensor([100 * index + number + rank])
            group = groups[index]
            with (
                get_tensors_parallel(mine, ALL, group) as tensors,
                get_configs_parallel({"a": mine}, ALL, group) as configs,
            ):
                found[index] += [int(tensor) for tensor in [*tensors, *(config["a"] for config in configs)]]

    threads = [threading.Thread(target=work, args=[index]) for index in ALL]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


SCENARIOS = ["in_threads", "other_hosts", "own_temporary_folders", "no_memory", "killed_on_the_way", "many_tensors"]


@pytest.fixture(scope="module")
def delivered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("delivered")
    return run_scenarios(__name__, SCENARIOS, 3, folder), folder


def values(results):
    assert [result.get("error") for result in results] == [None] * len(results)
    return [result["value"] for result in results]


def test_ranks_of_several_hosts_meet(delivered):
    first, second, third = values(delivered[0]["other_hosts"])
    assert third.pop("tensors") == [[5001, rank, 5000 + rank] for rank in (2, 1, 0)]
    assert first.pop("tensors") == second["tensors"] == []
    assert first == {
        "configs": [True, False, False],
        "no data": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        "folder": ALL,
    }
    assert (third["configs"], third["no data"], third["folder"]) == ([], [], [])


def test_the_first_rank_says_once_that_data_goes_over_the_network(delivered):
    log = (delivered[1] / "other_hosts.2.log").read_text()
    assert log.count("ranks [1] share no memory with rank 2: tensors travel over the network") == 1


def test_segment_the_first_rank_cannot_see_is_sent(delivered):
    assert values(delivered[0]["own_temporary_folders"]) == [ALL, [], []]


def test_room_is_made_before_anything_is_sent(delivered):
    errors = {result["error"] for result in delivered[0]["no_memory"]}
    assert errors == {
        "RankError: get_tensors_parallel: make room failed on rank 0: OSError: [Errno 12] Cannot allocate memory"
    }


def test_rank_killed_on_the_way_is_named(delivered):
    first, second, killed = delivered[0]["killed_on_the_way"]
    assert killed is None
    assert first["error"] == second["error"]
    assert "failed on rank 2: ended before 'get_tensors_parallel: transfer'" in first["error"]


def test_many_tensors_arrive_through_memory_and_folder(delivered):
    assert values(delivered[0]["many_tensors"]) == ["all right"] * 3


def test_threads_with_groups_of_their_own_gather_at_once(delivered):
    first, second, third = values(delivered[0]["in_threads"])
    assert first == [
        [100 * index + number + rank for number in range(10) for _ in range(2) for rank in ALL] for index in ALL
    ]
    assert second == third == [[], [], []]
