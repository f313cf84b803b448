"""Control and its channel: transfers, counted bytes, limits of a call, groups of their own for threads."""


import pytest
import torch
import torch.distributed as dist

from distribute.control import Control
from distribute.errors import RankError
from tests.torchrun import run_ranks

MEBIBYTE = 2**20


def alone():
    return Control.of([0])


def test_alone_a_transfer_to_itself_is_a_copy():
    received = torch.zeros(5, dtype=torch.uint8)
    alone().transfer("step", {0: torch.arange(5, dtype=torch.uint8)}, {0: received})
    assert received.tolist() == [0, 1, 2, 3, 4]
    assert alone().bytes_sent == 0


@pytest.mark.parametrize("bad", [torch.zeros(4), torch.zeros(4, 4, dtype=torch.uint8).T[:, :2]])
def test_a_transfer_takes_plain_bytes_only(bad):
    with pytest.raises(RankError, match="AssertionError"):
        alone().transfer("step", {0: bad}, {0: bad})


def error_of(body):
    try:
        body()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def transfers():
    dist.init_process_group("gloo")
    rank, control = dist.get_rank(), Control.of([0, 1, 2])
    found = {"sizes": []}

    def part(source, target, size=1000):
        return torch.full((size,), 10 * source + target, dtype=torch.uint8)

    for size in (1, 5 * MEBIBYTE):  # to both peers and to itself, from all of them
        before = control.bytes_sent
        got = {peer: torch.empty(size, dtype=torch.uint8) for peer in range(3)}
        control.transfer("all to all", {peer: part(rank, peer, size) for peer in range(3)}, got)
        found["sizes"].append([sorted({int(v) for v in tensor.unique()}) for tensor in got.values()])
        found[f"sent {size}"] = control.bytes_sent - before
    sends = {2: part(0, 2), 1: torch.empty(0, dtype=torch.uint8)} if rank == 0 else {}
    got = {0: torch.zeros(1000, dtype=torch.uint8)} if rank == 2 else {}
    control.transfer("one pair", sends, got)
    found["pair"] = [int(tensor.unique()) for tensor in got.values()]
    control.transfer("nothing", {}, {})
    found["peer failed"] = error_of(lambda: fails_before_a_transfer(control))
    found["sizes differ"] = error_of(lambda: control.transfer("uneven", sends, {}))
    before = control.bytes_sent
    control.exchange("long", "x" * 5000)
    found["record"] = control.bytes_sent - before
    return found


def fails_before_a_transfer(control):
    with control.together("step"):
        if control.rank == 1:
            raise OSError("disk gone")
        control.transfer("never", {}, {})


def test_tensors_reach_their_peers_and_are_counted():
    results = run_ranks(transfers, 3)
    for rank, found in enumerate(results):
        assert found["sizes"] == [[[10 * source + rank] for source in range(3)]] * 2
        assert 2 * 5 * MEBIBYTE <= found[f"sent {5 * MEBIBYTE}"] < 2 * 5 * MEBIBYTE + 5000
        assert found["pair"] == ([2] if rank == 2 else [])
        assert found["peer failed"] == "RankError: step failed on rank 1: OSError: disk gone"
        assert found["sizes differ"] == "AssertionError: uneven: 1000 bytes are sent, but 0 are expected"
        assert 10_000 < found["record"] < 15_000
