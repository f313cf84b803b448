"""Layouts against DTensor itself: its split rules, DTensors of pretend ranks in one process, and gloo under torchrun."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from distribute.errors import UserError
from distribute.live.layout import (
    SMALL,
    Layout,
    Mesh,
    Part,
    Run,
    indices,
    layout_of,
    owned_rows,
    part_of,
    replicas,
    row_runs,
    rows_and_width,
)
from tests.live_layouts import layouts, numbers, worlds
from tests.torchrun import run_ranks


def torch_part(layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Element numbers that a rank holds, cut by torch's placements themselves."""
    part = torch.arange(prod(layout.shape)).view(layout.shape)
    position = mesh.ranks.index(rank)
    coordinate = torch.arange(len(mesh.ranks)).view(mesh.shape).eq(position).nonzero()[0].tolist()
    for placement, count, place in zip(layout.placements, mesh.shape, coordinate, strict=True):
        if placement[0] == "S":
            _, dim, factor = placement
            rule = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
            part = rule._split_tensor(part, count, with_padding=False)[0][place]
    return part


@given(layouts())
def test_parts_are_those_that_torch_cuts(case: tuple[Layout, Mesh]) -> None:
    layout, mesh = case
    for rank in mesh.ranks:
        expected = torch_part(layout, mesh, rank)
        part = part_of(layout, mesh, rank)
        assert numbers(layout, part).flatten().tolist() == expected.flatten().tolist()
        assert [run.at for run in part.rows] == [
            sum(other.stop - other.start for other in part.rows[:i]) for i in range(len(part.rows))
        ]
        held = indices(layout, mesh, rank)
        assert held is not None
        assert tuple(sum(map(len, ranges)) for ranges in held) == tuple(expected.shape)
        whole_rows = expected.numel() == 0 or len(layout.shape) == 1 or expected.shape[-1] == layout.shape[-1]
        assert row_runs(layout, mesh, rank) == (part.rows if whole_rows else None)


@given(worlds(), st.integers(0, 9), st.booleans())
def test_every_row_is_owned_once_by_a_rank_that_holds_some_of_it(
    case: tuple[Layout, tuple[Mesh | None, ...]], turn: int, large: bool
) -> None:
    layout, meshes = case
    assume(prod(layout.shape))
    if large:
        layout = Layout((*layout.shape, SMALL), layout.placements)
    owned = owned_rows(layout, meshes, turn)
    assert len(owned) == len(meshes)
    rows = [row for ranges in owned for held in ranges for row in held]
    assert sorted(rows) == list(range(rows_and_width(layout.shape)[0]))
    for rank, ranges in enumerate(owned):
        runs = part_of(layout, meshes[rank], rank).rows
        assert {row for held in ranges for row in held} <= {row for run in runs for row in range(run.start, run.stop)}


def test_an_empty_tensor_has_no_rows_to_own() -> None:
    mesh = Mesh((0, 1), (2,))
    for shape in ((0,), (0, 4), (4, 0), (2, 0, 3)):
        assert owned_rows(Layout(shape, (("S", 0, 1),)), (mesh, mesh), 0) == ((), ())
        assert owned_rows(Layout(shape), (None, None), 0) == ((), ())


@given(st.integers(1, 5), st.integers(2, 50))
def test_replicas_share_rows_evenly(world: int, rows: int) -> None:
    owned = owned_rows(Layout((rows, SMALL)), (None,) * world, 0)
    counts = [sum(map(len, ranges)) for ranges in owned]
    assert max(counts) - min(counts) <= 1


def test_small_tensors_and_single_rows_go_to_one_holder_by_turn() -> None:
    for shape in ((), (7,), (2, 8), (1, 100_000)):
        rows = rows_and_width(shape)[0]
        for turn in range(5):
            owned = owned_rows(Layout(shape), (None,) * 3, turn)
            assert owned == tuple((range(rows),) if rank == turn % 3 else () for rank in range(3))


def test_replicas_of_a_row_shard_halve_it() -> None:
    mesh = Mesh((0, 1, 2, 3), (2, 2))  # two replicas of two shards
    layout = Layout((64, 4096), (("R",), ("S", 0, 1)))
    assert replicas(layout, (mesh,) * 4) == {
        Part((Run(0, 32, 0),), (range(4096),)): (0, 2),
        Part((Run(32, 64, 0),), (range(4096),)): (1, 3),
    }
    assert owned_rows(layout, (mesh,) * 4, 0) == ((range(16),), (range(32, 48),), (range(16, 32),), (range(48, 64),))


def test_meshes_that_differ_between_ranks_are_replicas_of_each_other() -> None:
    meshes = (Mesh((0, 1), (2,)),) * 2 + (Mesh((2, 3), (2,)),) * 2
    layout = Layout((64, 4096), (("S", 0, 1),))
    assert [row_runs(layout, mesh, rank) for rank, mesh in enumerate(meshes)] == [
        (Run(0, 32, 0),), (Run(32, 64, 0),), (Run(0, 32, 0),), (Run(32, 64, 0),)
    ]  # fmt: skip
    assert owned_rows(layout, meshes, 0) == ((range(16),), (range(32, 48),), (range(16, 32),), (range(48, 64),))


def test_rows_that_meshes_of_unlike_shapes_share_are_owned_once() -> None:
    pair, alone = Mesh((0, 2), (2,)), Mesh((1,), (1,))  # rank 1 holds all that ranks 0 and 2 hold together
    layout = Layout((9, 7), (("S", 0, 1),))
    owned = owned_rows(layout, (pair, alone, pair), 0)
    assert sorted(row for ranges in owned for held in ranges for row in held) == list(range(9))


def test_a_fused_weight_cut_across_its_middle_is_many_whole_rows() -> None:
    mesh, layout = Mesh((0, 1), (2,)), Layout((3, 4, 8), (("S", 1, 1),))
    assert row_runs(layout, mesh, 1) == (Run(2, 4, 0), Run(6, 8, 2), Run(10, 12, 4))


def test_columns_make_no_row_runs_but_a_vector_has_rows() -> None:
    mesh = Mesh((0, 1), (2,))
    assert row_runs(Layout((4, 8), (("S", 1, 1),)), mesh, 0) is None
    assert row_runs(Layout((5,), (("S", 0, 1),)), mesh, 1) == (Run(3, 5, 0),)
    assert row_runs(Layout((4, 1), (("S", 1, 1),)), mesh, 1) == ()  # more ranks than columns: it holds nothing


@contextmanager
def pretend(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world whose other ranks do not exist; nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def assert_right(tensor: DTensor, full: torch.Tensor) -> Layout:
    """That the layout names exactly the elements that are in the local part."""
    layout, mesh, local = layout_of("w", tensor)
    assert local.data_ptr() == tensor.to_local().data_ptr()
    part = part_of(layout, mesh, dist.get_rank())
    whole = full.reshape(rows_and_width(full.shape))
    rows = [row for run in part.rows for row in range(run.start, run.stop)]
    columns = [column for held in part.columns for column in held]
    assert torch.equal(whole[rows][:, columns].flatten(), local.flatten())
    return layout


@pytest.mark.parametrize("rows", [1, 5, 7, 8, 9, 13, 24])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (5, 2), (4, 4)])
def test_fsdp_over_tensor_parallelism_for_any_number_of_rows(rows: int, sizes: tuple[int, int]) -> None:
    full = torch.arange(rows * 4.0).view(rows, 4)
    held = []
    for rank in range(prod(sizes)):
        with pretend(rank, prod(sizes)):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
            module = torch.nn.Linear(4, rows, bias=False)
            module.weight = torch.nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(0)], src_data_rank=None))
            fully_shard(module, mesh=mesh["dp"])
            weight = module.state_dict()["weight"]
            assert any(isinstance(placement, _StridedShard) for placement in weight.placements)
            assert_right(weight, full)
            layout, own, _ = layout_of("w", weight)
            held += [row for run in part_of(layout, own, rank).rows for row in range(run.start, run.stop)]
    assert sorted(held) == list(range(rows))


STRIDED = [
    (_StridedShard(0, split_factor=2), Shard(0), Replicate()),
    (_StridedShard(0, split_factor=2), Replicate(), Shard(0)),
    (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0)),  # last axis first, then the first
    (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)),
    (_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2), Shard(0)),  # no order: as it is
]


@pytest.mark.parametrize("placements", STRIDED, ids=str)
def test_shards_are_cut_in_the_order_that_torch_reads_off_split_factors(placements: tuple[Placement, ...]) -> None:
    full = torch.arange(13 * 5.0).view(13, 5)
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    sizes = (3, 2, 2)
    for rank in range(prod(sizes)):
        with pretend(rank, prod(sizes)):
            mesh = init_device_mesh("cpu", sizes)
            order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh)
            if order is None:
                assert_right(distribute_tensor(full, mesh, placements, src_data_rank=None), full)
                continue
            local, shards = full, list(placements)
            for entry in order:
                for axis in entry.mesh_dims:
                    local = Shard(entry.tensor_dim)._split_tensor(local, sizes[axis], with_padding=False)[0][
                        mesh.get_coordinate()[axis]
                    ]
                    shards[axis] = Shard(entry.tensor_dim)
            assert_right(DTensor(local, DTensorSpec(mesh, placements, meta), requires_grad=False), full)
            said = DTensorSpec(mesh, tuple(shards), meta, shard_order=order)  # the same, said outright
            assert_right(DTensor(local, said, requires_grad=False), full)


def test_split_factors_that_no_order_gives_are_applied_as_they_are() -> None:
    full = torch.arange(24.0).view(12, 2)
    for rank in range(2):
        with pretend(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            tensor = distribute_tensor(full, mesh, [_StridedShard(0, split_factor=3)], src_data_rank=None)
            assert assert_right(tensor, full).placements == (("S", 0, 3),)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with pretend(1, 3):
        mesh = DeviceMesh("cpu", [0, 2])
        tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
        layout, own, local = layout_of("w", tensor)
        assert indices(layout, own, 1) is None
        assert row_runs(layout, own, 1) == ()
        assert local.numel() == 0
        assert owned_rows(layout, (own,) * 3, 0) == ((range(2),), (), (range(2, 4),))


def test_shards_on_a_mesh_whose_ranks_do_not_ascend_are_refused() -> None:
    with pretend(2, 4):
        replicate_only = DeviceMesh("cpu", [2, 0])
        layout_of("w", DTensor.from_local(torch.ones(4, 4), replicate_only, [Replicate()], run_check=False))
        for ranks, placements in ([2, 0], [Shard(0)]), ([[0, 1], [3, 2]], [Replicate(), Shard(0)]):
            mesh = DeviceMesh("cpu", ranks)
            tensor = distribute_tensor(torch.ones(4, 4), mesh, placements, src_data_rank=None)
            with pytest.raises(UserError, match=r"^w is cut along a mesh whose ranks do not ascend"):
                layout_of("w", tensor)


def test_what_cannot_be_exported_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^model\.w is on the meta device"):
        layout_of("model.w", torch.empty(2, device="meta"))
    with pytest.raises(UserError, match=r"^model\.w has layout torch\.sparse_coo"):
        layout_of("model.w", torch.eye(2).to_sparse())
    with pretend(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(UserError, match=r"^model\.w is Partial\(sum\)"):
            layout_of("model.w", DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))
        with pytest.raises(UserError, match=r"^model\.w is on the meta device"):
            layout_of("model.w", distribute_tensor(torch.empty(2, device="meta"), mesh, [Shard(0)]))
        uneven = DTensor.from_local(
            torch.ones(1, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size([4, 2]), stride=(2, 1)
        )
        with pytest.raises(UserError, match=r"^model\.w: this rank holds \[1, 2\] of \[4, 2\].* give it \[2, 2\]"):
            layout_of("model.w", uneven)


def matrix(mesh: DeviceMesh) -> int:
    """Every pair of placements of some shapes on a mesh: parts are right, and the whole is what torch gathers."""
    seen = 0
    for shape in [(7,), (8, 6), (3, 5), (2, 3, 4), (1, 1), (0, 4)]:
        full = torch.arange(float(prod(shape))).view(shape)
        shards = [Shard(dim) for dim in range(len(shape))]
        for placements in product([Replicate(), *shards], repeat=mesh.ndim):
            tensor = distribute_tensor(full, mesh, list(placements))
            assert_right(tensor, full)
            assert torch.equal(tensor.full_tensor(), full)
            seen += 1
    return seen


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)
        self.register_buffer("step", torch.tensor(3.0))


def check_state(module: torch.nn.Module, full: dict[str, torch.Tensor]) -> list[str]:
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, DTensor):
            assert_right(tensor, full[name])
            assert torch.equal(tensor.full_tensor(), full[name])
        else:
            layout, mesh, local = layout_of(name, tensor)
            assert mesh is None and layout == Layout(tuple(tensor.shape)) and local is tensor
    return [str(tensor.placements) for tensor in module.state_dict().values() if isinstance(tensor, DTensor)]


def real_dtensors() -> dict[str, Any]:
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    seen = matrix(line)
    torch.manual_seed(0)
    block = Block()
    full = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    placements = []
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        seen += matrix(square)
        for mesh in (square["dp"], square):  # FSDP over tensor parallelism; HSDP
            torch.manual_seed(0)
            block = Block()
            if mesh is not square:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, square["tp"], plan)
            fully_shard(block, mesh=mesh)
            placements += check_state(block, full)
        half = DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3], _init_backend=False)
        assert_right(distribute_tensor(full["up.weight"], half, [Shard(0)], src_data_rank=None), full["up.weight"])
        seen += 1
    else:
        fully_shard(block, mesh=line)
        placements += check_state(block, full)
    dist.destroy_process_group()
    return {"seen": seen, "placements": sorted(set(placements))}


@pytest.mark.parametrize("world", [2, 4])
def test_real_dtensors_of_gloo_ranks(world: int) -> None:
    results = run_ranks(real_dtensors, world)
    one, two = 18, 56  # placements of all shapes on a mesh of one axis, of two
    assert [result["seen"] for result in results] == [one + two + 1 if world == 4 else one] * world
    strided = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    kinds = {"(Shard(dim=0),)"}
    if world == 4:  # column and row parallel weights under FSDP, the bias that is not cut by it, and HSDP
        kinds = {
            strided,
            "(Shard(dim=0), Shard(dim=1))",
            "(Shard(dim=0), Replicate())",
            "(Replicate(), Shard(dim=0))",
        }
    assert {kind for result in results for kind in result["placements"]} == kinds
