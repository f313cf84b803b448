"""What travels: records alone for whole rows, parts of rows once, and nothing in the process groups of the caller."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from distribute import distributed_save_hf_checkpoint
from distribute.ranks import Ranks
from tests.live_models import make_live, place
from tests.torchrun import run_ranks

#: 251, 72, 18, 200 rows and more: neither 2, 3 nor 5 divides all of them.
UNEVEN = {"vocab_size": 251, "hidden_size": 72, "head_dim": 18, "intermediate_size": 200}
LARGE = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 8000, "num_hidden_layers": 3}
RECORDS = 32 << 10  # bytes to each peer, for a model so small that records outweigh a hundredth of it


class Collectives(TorchDispatchMode):
    """Names of the collectives that go through torch while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(found: dict[str, Any]) -> Iterator[None]:
    """Bytes that this rank sends, and collectives of the caller's groups, added to `found`."""
    before = Ranks.join().control.bytes_sent
    with Collectives() as collectives:
        yield
    found |= {"sent": Ranks.join().control.bytes_sent - before, "collectives": collectives.seen}


def column_parallel(model: nn.Module, world: int) -> None:
    """Rows of q, k, v, gate and up over the ranks; the rest whole on each."""
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        parallelize_module(layer, mesh, {name: ColwiseParallel() for name in names})


#: World -> what one job saves.
JOBS: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [("fsdp", UNEVEN), ("colwise", LARGE), ("tp", LARGE)],
    3: [("fsdp", UNEVEN), ("second", LARGE)],
    4: [("fsdp_tp", LARGE)],
    5: [("fsdp", UNEVEN)],
}


def saves(folder: str, world: int) -> dict[str, Any]:
    """By placement, what `counted` found, bytes of the model and of tensors that are cut across their rows."""
    dist.init_process_group("gloo")
    saved: dict[str, Any] = {}
    for placement, config in JOBS[world]:
        model = make_live("llama", **config)
        if placement == "colwise":
            column_parallel(model, world)
        else:
            place(model, placement, world)
        found: dict[str, Any] = {}
        with counted(found):
            distributed_save_hf_checkpoint(model, Path(folder, placement), 448.0, None, "20MB")
        tensors = model.state_dict().values()
        cut = [tensor.nbytes for tensor in tensors if Shard(1) in getattr(tensor, "placements", ())]
        saved[placement] = found | {"total": sum(tensor.nbytes for tensor in tensors), "cut": sum(cut)}
    saved["proof"] = {}
    with counted(saved["proof"]):
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    return saved


class Saved(NamedTuple):
    """`ranks` by world: what each rank returned; `folders` by world."""

    ranks: dict[int, list[dict[str, Any]]]
    folders: dict[int, Path]

    def of(self, world: int, placement: str) -> list[dict[str, Any]]:
        return [rank[placement] for rank in self.ranks[world]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folders = {world: tmp_path_factory.mktemp(f"world{world}") for world in JOBS}
    return Saved({world: run_ranks(saves, world, str(folder), world) for world, folder in folders.items()}, folders)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_uneven_shards_of_rows_stay_where_they_are(world: int, saved: Saved) -> None:
    for found in saved.of(world, "fsdp"):
        assert 0 < found["sent"] <= RECORDS * (world - 1)
    stored = load_file(saved.folders[world] / "fsdp" / "model.safetensors")
    expected = make_live("llama", **UNEVEN).state_dict()
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


def test_of_column_parallel_layers_only_records_travel(saved: Saved) -> None:
    results = saved.of(2, "colwise")
    assert results[0]["total"] > 35e6
    assert 0 < sum(found["sent"] for found in results) < 0.01 * results[0]["total"]


@pytest.mark.parametrize(("world", "placement", "shards"), [(2, "tp", 2), (3, "second", 3), (4, "fsdp_tp", 2)])
def test_parts_of_rows_travel_once(world: int, placement: str, shards: int, saved: Saved) -> None:
    """Of `shards` parts of a row, its owner has one already."""
    results = saved.of(world, placement)
    total, cut = results[0]["total"], results[0]["cut"]
    moved, records = cut * (shards - 1) / shards, 0.01 * total
    assert cut > 0.15 * total
    assert moved <= sum(found["sent"] for found in results) < moved + records
    assert all(found["sent"] < 1.5 * moved / world + records for found in results), "the load is shared"


def test_groups_of_the_caller_are_not_used(saved: Saved) -> None:
    for world, ranks in saved.ranks.items():
        for found in ranks:
            assert found["proof"]["collectives"] == ["c10d.allreduce_.default"], "it would be seen"
            assert [found[placement]["collectives"] for placement, _ in JOBS[world]] == [[]] * len(JOBS[world])
