"""Large tensors read from another process's memory: bit for bit, or not at all and then by another way."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from distribute import get_configs_parallel, get_tensors_parallel, peer_memory
from distribute.ranks import Ranks
from distribute.state import from_buffer, plan_layout
from tests.distribute.test_state import assert_same, odd_tensors
from tests.torchrun import left_segments, run_ranks

TENSORS = odd_tensors() | {"large": torch.arange(1 << 19).to(torch.float32)}


@contextmanager
def forked(layout, tensors) -> Iterator[tuple[int, list[peer_memory.Range]]]:
    """A child that holds an offer; its memory is a copy of this one's, at the same addresses."""
    offer = peer_memory.Offer(layout, tensors)
    done, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        os.read(done, 1)
        os._exit(0)
    try:
        yield pid, offer.ranges
    finally:
        os.close(done)
        os.close(end)
        os.waitpid(pid, 0)


def test_a_state_is_read_bit_for_bit():
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    layout = plan_layout(tensors, {"a": "b"})
    with forked(layout, tensors) as (pid, ranges):
        buffer = peer_memory.read(pid, ranges, layout.nbytes)
    metadata, found = from_buffer(buffer)
    assert metadata == {"a": "b"}
    assert_same(found, tensors)


def test_a_process_or_memory_that_is_not_there_is_an_error():
    layout = plan_layout(TENSORS, {})
    plain = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    with forked(layout, plain) as (pid, _), pytest.raises(OSError):
        peer_memory.read(pid, [(8, 16, 0)], 16)
    with pytest.raises(OSError):
        peer_memory.read(pid, [(8, 16, 0)], 16)


@pytest.mark.parametrize(
    ("tensor", "can"),
    [
        (torch.zeros(1 << 18), True),
        (torch.zeros(16), False),
        (torch.zeros(1 << 10, 1 << 9).T, False),
    ],
)
def test_only_large_plain_memory_is_offered(tensor, can):
    tensors = {"t": tensor}
    assert peer_memory.Offer.can_be(plan_layout(tensors, {}), tensors) is can


def large(rank: int) -> torch.Tensor:
    return (torch.arange(1 << 19) * (rank + 3)).to(torch.bfloat16)


def gathers(refuse: bool) -> dict[str, object]:
    """Large and small, of three ranks; once with a kernel that forbids it. Returns what the first rank saw."""
    read, calls = peer_memory.read, []

    def counted(pid, ranges, nbytes):
        calls.append(nbytes)
        if refuse:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        return read(pid, ranges, nbytes)

    peer_memory.read = counted
    with Ranks.start(wait_limit_s=60) as ranks:
        same = []
        for _ in range(2):
            with get_tensors_parallel(large(ranks.rank), [1, 2, 0]) as tensors:
                same += [torch.equal(item, large(rank)) for rank, item in zip([1, 2, 0], tensors, strict=False)]
                kept = list(tensors)
        config = (
            None
            if ranks.rank == 2
            else {"w": [large(ranks.rank), torch.tensor(ranks.rank)], "t": large(0).view(512, -1).T}
        )
        with get_configs_parallel(config, [0, 1, 2], None) as configs:
            whole = [
                c and [torch.equal(c["w"][0], large(r)), int(c["w"][1]), list(c["t"].shape)]
                for r, c in enumerate(configs)
            ]
        ranks.barrier()
        after = [torch.equal(item, large(rank)) for rank, item in zip([1, 2, 0], kept, strict=False)]
    return {"same": same, "after": after, "whole": whole, "calls": calls}


@pytest.mark.parametrize("refuse", [False, True])
def test_gathers_are_equal_whether_memory_can_be_read_or_not(refuse: bool):
    before = left_segments()
    first, second, third = run_ranks(gathers, 3, refuse)
    assert second["same"] == [True] * 6
    assert second["after"] == [True] * 3
    assert first["whole"] == [[True, 0, [1024, 512]], [True, 1, [1024, 512]], None]
    assert third["same"] == third["calls"] == []
    if refuse:  # asked once: everybody remembers
        assert len(second["calls"]) == 1
        assert first["calls"] == []
    else:
        assert len(second["calls"]) == 4
    assert set(left_segments()) <= set(before)
