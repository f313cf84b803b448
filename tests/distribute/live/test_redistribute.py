"""Rows put together from parts of them: pretend ranks as threads for any layout, real DTensors over gloo."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from distribute.control import Control
from distribute.errors import UserError
from distribute.live.layout import Layout, Mesh, indices, layout_of, owned_rows, part_of, row_runs, rows_and_width
from distribute.live.redistribute import full_rows, local_rows
from tests.live_layouts import numbers, worlds
from tests.torchrun import run_ranks

Meshes = tuple[Mesh | None, ...]


class Mail:
    """What threads, as ranks, send each other; stands for Control.transfer."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.sent: dict[tuple[int, int], torch.Tensor] = {}
        self.bytes = [0] * world
        self.rounds = 0
        self.routes: set[tuple[int, int]] = set()

    def transfer(self, rank: int, step: str, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> None:
        assert all(t.dtype == torch.uint8 and t.is_contiguous() for t in (*sends.values(), *receives.values()))
        self.sent |= {(rank, peer): tensor for peer, tensor in sends.items()}
        self.routes |= {(rank, peer) for peer in sends}
        self.bytes[rank] += sum(tensor.numel() for tensor in sends.values())
        self.barrier.wait()
        for peer, tensor in receives.items():
            tensor.copy_(self.sent.pop((peer, rank)))
        if self.barrier.wait() == 0:
            assert not self.sent, "sent, but not received"
            self.rounds += 1
        self.barrier.wait()


def on_threads(
    full: torch.Tensor,
    layout: Layout,
    meshes: Meshes,
    make_local: Callable[[torch.Tensor], torch.Tensor],
    **options: Any,
) -> tuple[list[list[tuple[range, torch.Tensor]]], Mail]:
    """What `full_rows` yields on each rank, of parts that `make_local` makes of the right values."""
    world = len(meshes)
    mail, owned = Mail(world), owned_rows(layout, meshes, 1)

    def run(rank: int) -> list[tuple[range, torch.Tensor]]:
        control: Any = SimpleNamespace(rank=rank, transfer=partial(mail.transfer, rank))
        held = indices(layout, meshes[rank], rank)
        shape = [sum(map(len, ranges)) for ranges in held] if held is not None else [0]
        part = full.flatten()[numbers(layout, part_of(layout, meshes[rank], rank)).flatten()]
        local = make_local(part.view(shape) if part.numel() or 0 in shape else part)
        return list(full_rows(local, layout, meshes, control, owned, **options))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world))), mail


def random_bits(count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    bits = torch.randint(
        0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    return (bits % 2 if dtype == torch.bool else bits).view(dtype).view(shape)


def bits_of(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def transposed(local: torch.Tensor) -> torch.Tensor:
    """Equal values that lie in memory in the order of the last dimension first."""
    return local.movedim(-1, 0).contiguous().movedim(0, -1) if local.dim() else local


DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32, torch.int64, torch.bool]


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from(DTYPES), st.sampled_from([1, 40, 1 << 20]), st.booleans())
def test_every_owner_gets_its_rows_bit_for_bit(
    case: tuple[Layout, Meshes], dtype: torch.dtype, block_bytes: int, strided: bool
) -> None:
    layout, meshes = case
    full = random_bits(prod(layout.shape), dtype, layout.shape)
    rows, width = rows_and_width(layout.shape)
    local = transposed if strided else torch.Tensor.contiguous
    found, _ = on_threads(full, layout, meshes, local, block_bytes=block_bytes)
    for ranges, pieces in zip(owned_rows(layout, meshes, 1), found, strict=True):
        assert [row for at, _ in pieces for row in at] == [row for held in ranges for row in held]
        for at, tensor in pieces:
            assert tensor.dtype == dtype
            assert tensor.shape == (len(at), width)
            assert len(at) == 1 or tensor.numel() * dtype.itemsize <= block_bytes
            assert bits_of(tensor) == bits_of(full.view(rows, width)[at.start : at.stop])


@pytest.mark.parametrize(
    ("placements", "sizes"),
    [
        ((("S", 1, 1),), (4,)),
        ((("R",), ("S", 1, 1)), (2, 2)),  # replicas of a column shard
        ((("S", 0, 1), ("S", 1, 1)), (2, 2)),  # FSDP over a row-parallel weight
        ((("S", 1, 2),), (4,)),
    ],
)
def test_an_owner_is_sent_only_the_columns_it_lacks_and_replicas_send_alike(
    placements: tuple[tuple, ...], sizes: tuple[int, ...]
) -> None:
    layout, mesh = Layout((64, 1024), placements), Mesh((2, 0, 3, 1), sizes)
    meshes = (mesh,) * 4
    full = random_bits(64 * 1024, torch.bfloat16, layout.shape)
    found, mail = on_threads(full, layout, meshes, torch.Tensor.contiguous)
    for at, rows in (piece for pieces in found for piece in pieces):
        assert bits_of(rows) == bits_of(full[at.start : at.stop])
    lacking = sum(
        sum(map(len, owned)) * (1024 - sum(map(len, part_of(layout, mesh, rank).columns))) * 2
        for rank, owned in enumerate(owned_rows(layout, meshes, 1))
    )
    assert lacking > 0
    assert mail.bytes == [lacking // 4] * 4


def test_owners_complete_their_blocks_at_the_same_time() -> None:
    layout, mesh = Layout((64, 1024), (("S", 1, 1),)), Mesh((0, 1, 2, 3), (4,))
    full = random_bits(64 * 1024, torch.uint8, layout.shape)
    _, mail = on_threads(full, layout, (mesh,) * 4, torch.Tensor.contiguous, block_bytes=4 * 1024)
    assert mail.rounds == 4  # 64 rows of 4 owners, 4 rows each a round


def test_a_block_is_made_of_many_short_runs_of_rows() -> None:
    layout, mesh = Layout((16, 4, 1024), (("S", 1, 1), ("S", 2, 1))), Mesh((0, 1, 2, 3), (2, 2))
    full = random_bits(64 * 1024, torch.uint8, layout.shape)
    found, mail = on_threads(full, layout, (mesh,) * 4, torch.Tensor.contiguous, block_bytes=8 * 1024)
    assert [len(pieces) for pieces in found] == [8] * 4  # two neighbouring rows each
    assert mail.rounds == 2  # 16 rows of each owner, 8 rows a round


def test_nothing_is_sent_to_a_rank_that_holds_whole_rows() -> None:
    layout, pair = Layout((60, 1024), (("S", 1, 1),)), Mesh((0, 1), (2,))
    meshes = (pair, pair, Mesh((2,), (1,)))
    full = random_bits(60 * 1024, torch.uint8, layout.shape)
    found, mail = on_threads(full, layout, meshes, torch.Tensor.contiguous)
    assert [at for pieces in found for at, _ in pieces] == [range(20), range(20, 40), range(40, 60)]
    assert {peer for _, peer in mail.routes} == {0, 1}


def test_whole_rows_are_not_sent() -> None:
    layout, mesh = Layout((64, 1024), (("S", 0, 1),)), Mesh((0, 1), (2,))
    found, mail = on_threads(
        random_bits(64 * 1024, torch.uint8, layout.shape), layout, (mesh, mesh), torch.Tensor.contiguous
    )
    assert [at for pieces in found for at, _ in pieces] == [range(32), range(32, 64)]
    assert mail.rounds == 0


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4), (2, 2, 2, 3)])
@pytest.mark.parametrize("strided", [False, True])
def test_local_rows_of_any_strides(shape: tuple[int, ...], strided: bool) -> None:
    tensor = torch.arange(float(prod(shape))).view(shape)
    rows, width = rows_and_width(shape)
    found = local_rows(transposed(tensor) if strided else tensor, rows // 2, rows)
    assert torch.equal(found, tensor.reshape(rows, width)[rows // 2 :])
    if strided and len(shape) > 2:  # no view can have these rows, and not the whole tensor is copied for them
        assert found.untyped_storage().nbytes() == found.numel() * 4


def test_rows_of_a_contiguous_tensor_are_not_copied() -> None:
    tensor = torch.ones(2, 3, 4)
    assert local_rows(tensor, 1, 3).data_ptr() == tensor[0, 1].data_ptr()


def real_redistribution() -> int:
    """Placements on one and two axes, of several dtypes; what comes is what torch gathers."""
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    control = Control.of(range(world))
    cases: list[tuple[Any, list[Any]]] = [(init_device_mesh("cpu", (world,)), [Shard(-1)])]
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        pairs = [[Shard(0), Shard(-1)], [Replicate(), Shard(-1)], [Shard(-1), Shard(-1)], [Shard(-1), Replicate()],
                 [_StridedShard(1, split_factor=2), Shard(1)]]  # fmt: skip
        cases += [(square, pair) for pair in pairs]
    cut = turn = 0
    for mesh, placements in cases:
        for shape in [(6, 7), (3, 1), (2, 3, 5), (40, 1024)]:
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
                full = random_bits(prod(shape), dtype, shape)
                carried = distribute_tensor(full.view(BITS[dtype.itemsize]), mesh, placements, src_data_rank=None)
                layout, own, local = layout_of("w", carried)
                meshes = (own,) * world
                owned = owned_rows(layout, meshes, turn)
                whole = full.view(rows_and_width(shape))
                for at, rows in full_rows(local.view(dtype), layout, meshes, control, owned, block_bytes=8192):
                    assert rows.dtype == dtype
                    assert bits_of(rows) == bits_of(whole[at.start : at.stop])
                cut += row_runs(layout, own, rank) is None
                turn += 1
    assert failing(control) == "rank 1 stops"
    dist.destroy_process_group()
    return cut


BITS = {1: torch.uint8, 2: torch.int16}


def failing(control: Control) -> str:
    """What a rank hears whose peer fails between two blocks."""
    world = len(control.members)
    layout, mesh = Layout((64, 4096), (("S", 1, 1),)), Mesh(control.members, (world,))
    local = torch.ones(64, sum(map(len, part_of(layout, mesh, control.rank).columns)))
    owned = owned_rows(layout, (mesh,) * world, 0)
    with pytest.raises(UserError) as caught, control.together("export"):
        for _ in full_rows(local, layout, (mesh,) * world, control, owned, block_bytes=16384):
            if control.rank == 1:
                raise UserError("rank 1 stops")
    return str(caught.value)


@pytest.mark.parametrize(("world", "cut"), [(3, 9), (4, 51)])
def test_real_dtensors_of_gloo_ranks(world: int, cut: int) -> None:
    assert run_ranks(real_redistribution, world)[0] == cut
