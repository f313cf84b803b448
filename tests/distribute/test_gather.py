"""The two gathers: right bytes in the right order, the same error on every rank, and nothing left behind."""

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distribute import get_configs_parallel, get_tensors_parallel, segments
from distribute.errors import RankError, UserError
from distribute.ranks import Ranks
from tests.distribute.test_state import assert_same, odd_tensors
from tests.torchrun import left_segments, run_ranks, wait_until


@dataclass
class Layer:
    weight: torch.Tensor
    parts: list
    bias: torch.Tensor | None = None


@pytest.fixture(autouse=True)
def no_segment_left():
    before = set(left_segments())
    yield
    wait_until(lambda: set(left_segments()) <= before, 10, "the end of all segments")  # other test runs have some too


def test_one_rank_needs_no_process_group():
    tensor = torch.arange(4.0, requires_grad=True)
    with get_tensors_parallel(tensor, [0]) as tensors:
        assert [item.tolist() for item in tensors] == [[0.0, 1.0, 2.0, 3.0]]
        assert tensors[0].data_ptr() == tensor.data_ptr()
    assert tensors == []
    config = {"a": [tensor, None]}
    with get_configs_parallel(config, [0], None) as configs:
        assert configs[0] is config
    with get_configs_parallel(None, [0], None, "never made") as configs:
        assert configs == [None]


def test_one_rank_refuses_what_more_would():
    with pytest.raises(UserError, match=r"config\['a'\] is a set"), get_configs_parallel({"a": {1}}, [0], None):
        pass
    with pytest.raises(UserError, match="was given a list; give a tensor"), get_tensors_parallel([1.0], [0]):
        pass


def test_error_in_the_body_is_the_cause():
    with pytest.raises(RankError) as caught, get_tensors_parallel(torch.ones(1), [0]):
        raise KeyError("lost")
    assert caught.value.reasons == {0: "KeyError: 'lost'"}
    assert isinstance(caught.value.__cause__, KeyError)


def error_of(body):
    try:
        body()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def config_of(rank):
    layer = Layer(torch.full((2, 3), float(rank)).T, [torch.tensor(rank), {"a.b/ü": torch.zeros(0, 4)}])
    return {"layers": [layer], "number": rank, ("none" if rank else "nothing"): None, 3: float("inf")}


def left_by_this_job():
    job = segments.new_name().split("-")[5]  # not those of other test runs on this machine
    return [name for name in left_segments() if f"-{job}-" in name]


def summary(config):
    layer = config["layers"][0]
    assert isinstance(layer, Layer)
    parts = [layer.parts[0].item(), list(layer.parts[1]["a.b/ü"].shape)]
    return [config["number"], layer.weight.tolist(), parts, layer.bias, sorted(map(str, config)), str(config[3])]


def gathers_tensors(rank, found):
    for tensor in odd_tensors().values():
        with get_tensors_parallel(tensor, [0, 1]) as tensors:
            assert_same(dict(enumerate(tensors)), {0: tensor, 1: tensor} if rank == 0 else {})
    with get_tensors_parallel(torch.tensor([rank]), [1, 0]) as tensors:  # the order of ranks is the caller's
        found["order"] = [int(tensor) for tensor in tensors]
    with get_tensors_parallel(torch.full((2,), rank), [0, 1], dist.group.WORLD) as outer:
        with get_tensors_parallel(torch.full((2,), rank + 10), [0, 1]) as inner:
            found["nested"] = [tensor.tolist() for tensor in [*outer, *inner]]
            found["names in a body"] = left_by_this_job()
        kept = list(outer)
    found["kept"] = [tensor.tolist() for tensor in kept]


def gathers_configs(rank, found, folder):
    for name, path in (("memory", None), ("folder", Path(folder, "gathered"))):
        with get_configs_parallel(config_of(rank), [0, 1], None, path) as configs:
            found[name] = [summary(config) for config in configs]
            found[f"{name} rest"] = os.listdir(path) if path and rank == 0 else []
        with get_configs_parallel(None if rank else {"a": 1}, [0, 1], None, path) as configs:
            found[f"{name} none"] = list(configs)
        with get_configs_parallel(None if rank == 0 else {"a": torch.ones(1)}, [0, 1], None, path) as configs:
            found[f"{name} first none"] = len(configs) and [configs[0], configs[1]["a"].tolist()]
        many = {f"tensor.{index}": torch.tensor([index, rank]) for index in range(300)}
        with get_configs_parallel(many, [0, 1], None, path) as configs:
            found[f"{name} many"] = [[len(config), config["tensor.299"].tolist()] for config in configs]
    with get_configs_parallel({"rank": rank}, [0, 1], None) as configs:
        found["no tensors"] = list(configs)


def fails(rank, found, folder):
    def enter(gather):
        with gather:
            pass

    def fail_in_body():
        with get_configs_parallel({"w": torch.ones(4)}, [0, 1], None):
            if rank == 0:
                raise OSError("consumer broke")

    def fail_in_nested_body():
        with get_tensors_parallel(torch.ones(2), [0, 1]), get_tensors_parallel(torch.ones(3), [0, 1]):
            if rank == 1:
                raise OSError("inner broke")

    def refused(**changes):
        real = {name: getattr(segments.os, name) for name in changes}
        vars(segments.os).update(changes)
        try:
            enter(get_tensors_parallel(torch.ones(4), [0, 1]))
        finally:
            vars(segments.os).update(real)

    def no_map(path, flags, *args):
        raise PermissionError(13, "Permission denied")

    shape = [2, 3] if rank == 0 else [3, 2]
    found["shape"] = error_of(lambda: enter(get_tensors_parallel(torch.ones(shape), [0, 1])))
    dtype = torch.float32 if rank == 0 else torch.bfloat16
    found["dtype"] = error_of(lambda: enter(get_tensors_parallel(torch.ones(2, dtype=dtype), [0, 1])))
    found["not a tensor"] = error_of(lambda: enter(get_tensors_parallel(torch.ones(2) if rank == 0 else 2, [0, 1])))
    found["unsendable"] = error_of(lambda: enter(get_configs_parallel([b"x"] if rank else [], [0, 1], None)))
    found["order differs"] = error_of(lambda: enter(get_configs_parallel(1, [rank, 1 - rank], None)))
    found["path differs"] = error_of(
        lambda: enter(get_configs_parallel(1, [0, 1], None, str(folder) if rank else None))
    )
    found["body"] = error_of(fail_in_body)
    found["nested body"] = error_of(fail_in_nested_body)
    found["writer"] = error_of(lambda: refused(posix_fallocate=no_map) if rank else refused())
    found["reader"] = error_of(lambda: refused() if rank else refused(open=no_map))
    found["not mine"] = error_of(lambda: enter(get_configs_parallel(1, [2 + rank], None)))


def gathers(folder):
    """Everything that needs two ranks; one job, because a start is slow."""
    warnings.simplefilter("error")
    found = {}
    with Ranks.start(wait_limit_s=30) as ranks:
        gathers_tensors(ranks.rank, found)
        gathers_configs(ranks.rank, found, folder)
        with torch.inference_mode():
            found["inference"] = [item["w"].tolist() for item in ranks.gather({"w": torch.ones(1)})]
        fails(ranks.rank, found, folder)
        ranks.barrier()
        found["left"] = left_by_this_job()
        ranks.barrier()
    return found


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    return run_ranks(gathers, 2, str(tmp_path_factory.mktemp("gathers")))


def test_tensors_arrive_in_the_order_of_ranks(gathered):
    first, second = gathered
    assert (first["order"], second["order"]) == ([], [1, 0])
    assert first["nested"] == [[0, 0], [1, 1], [10, 10], [11, 11]]
    assert first["kept"] == [[0, 0], [1, 1]]
    assert second["nested"] == second["kept"] == []


@pytest.mark.parametrize("way", ["memory", "folder"])
def test_configs_arrive_whole(gathered, way):
    first, second = gathered
    for rank, (number, weight, parts, bias, keys, infinity) in enumerate(first[way]):
        assert (number, weight, parts, bias) == (rank, [[rank] * 2] * 3, [rank, [0, 4]], None)
        assert keys == sorted(["layers", "number", "none" if rank else "nothing", "3"])
        assert infinity == "inf"
    assert first[f"{way} none"] == [{"a": 1}, None]
    assert first[f"{way} first none"] == [None, [1.0]]
    assert first[f"{way} many"] == [[300, [299, 0]], [300, [299, 1]]]
    assert first["no tensors"] == [{"rank": 0}, {"rank": 1}]
    assert all(not value for name, value in second.items() if name.startswith(way))


def test_nothing_has_a_name_while_the_body_runs(gathered):
    for found in gathered:
        assert found["names in a body"] == []
        assert found["left"] == []
    assert gathered[0]["folder rest"] == []


def test_works_in_inference_mode(gathered):
    assert gathered[0]["inference"] == [[1.0], [1.0]]


def test_writer_without_a_place_sends_over_the_network(gathered):
    assert [found["writer"] for found in gathered] == [None, None]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("shape", "UserError: .* rank 0 has float32 [2, 3], but rank 1 has float32 [3, 2]; use get_configs_parallel"),
        ("dtype", "UserError: .* rank 0 has float32 [2], but rank 1 has bfloat16 [2]"),
        ("not a tensor", "UserError: get_tensors_parallel was given a int; give a tensor"),
        ("unsendable", "UserError: config[0] is a bytes"),
        ("order differs", "UserError: .* but the ranks differ: {0: [0, 1], 1: [1, 0]}"),
        ("path differs", "UserError: .* whether there is a workspace path differ"),
        ("body", "RankError: get_configs_parallel failed on rank 0: OSError: consumer broke"),
        ("nested body", "RankError: get_tensors_parallel failed on rank 1: OSError: inner broke"),
        ("reader", "RankError: get_tensors_parallel: read failed on rank 0: PermissionError"),
    ],
)
def test_every_rank_raises_the_same_error(gathered, case, text):
    first, second = gathered
    assert first[case] == second[case]
    for part in text.split(" .* "):
        assert part in first[case]


def test_a_rank_that_is_not_named_is_refused(gathered):
    assert [found["not mine"].split(";")[0] for found in gathered] == [
        f"UserError: rank {rank} is not one of ranks [{rank + 2}]" for rank in (0, 1)
    ]


def gathers_in_subsets():
    """Ranks meet in groups of which each has made another number before; every rank holds other experts."""
    with Ranks.start(compute_limit_s=2) as ranks:
        rank, found = ranks.rank, {}
        experts = {f"experts.{index}": torch.tensor(index) for index in range(2 * rank, 2 * rank + 2)}
        for members in ([1, 2], [2, 0, 1], [2, 0]):
            if rank in members:
                with get_configs_parallel(None if rank == 1 else experts, members, None) as configs:
                    found[str(members)] = [sorted(config) if config else config for config in configs]
            if members == [1, 2] and rank == 2:
                time.sleep(3)  # longer than the limit of the caller's group
        ranks.barrier()
        return found


def test_subsets_of_ranks_meet_in_any_order():
    first, second = ["experts.0", "experts.1"], ["experts.4", "experts.5"]
    assert run_ranks(gathers_in_subsets, 3) == [
        {"[2, 0, 1]": [], "[2, 0]": []},
        {"[1, 2]": [None, second], "[2, 0, 1]": []},
        {"[1, 2]": [], "[2, 0, 1]": [second, first, None], "[2, 0]": [second, first]},
    ]
