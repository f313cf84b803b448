"""Control and its channel: transfers, counted bytes, limits of a call, groups of their own for threads."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distribute.channel import Channel
from distribute.control import Control
from distribute.errors import RankError
from tests.torchrun import end_tree, run_ranks, wait_until

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


def meets_in_groups():
    """Threads with a group each, in another order on each rank; then groups that do not fit."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    sums = [0] * len(groups)

    def work(index):
        time.sleep(0.05 * ((index + 2 * rank) % 4))
        control = Control.of([0, 1], groups[index])
        for number in range(20):
            sums[index] += sum(control.exchange(f"thread {index}", 100 * index + number).values())

    threads = [threading.Thread(target=work, args=[index]) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["sums"] = sums
    single = [dist.new_group([one]) for one in (0, 1)][rank]
    found["group too small"] = error_of(lambda: Control.of([0, 1], single))
    found["group too large"] = error_of(lambda: Control.of([rank], groups[0]))
    found["no group"] = error_of(lambda: Control.of([0, 1], "world"))
    return found


def test_threads_with_groups_of_their_own_do_not_collide():
    results = run_ranks(meets_in_groups, 2)
    for rank, found in enumerate(results):
        assert found["sums"] == [2 * (20 * 100 * index + 190) for index in range(4)]
        assert found["group too small"] == (
            f"UserError: the given group has ranks [{rank}], which must be the same as ranks [0, 1]"
        )
        assert found["group too large"].startswith("UserError: the given group has ranks [0, 1]")
        assert found["no group"].startswith("UserError: the given group has ranks []")


def stops(folder, step):
    """Rank 1 of four stops; not all of the others are its neighbours in the ring, and none of them ends."""
    dist.init_process_group("gloo")
    rank, control = dist.get_rank(), None
    if step == "inside":
        Control.of(range(4), limit_s=50).exchange("connect")
    started = time.monotonic()
    if rank == 1:
        if step == "inside":  # it has come to the transfer, and stops before it sends
            Channel._place = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    data = {peer: torch.zeros(16 * MEBIBYTE, dtype=torch.uint8) for peer in range(4) if peer != rank}

    def send():
        nonlocal control
        control = Control.of(range(4), limit_s=2)
        control.transfer("send", data, {peer: tensor.clone() for peer, tensor in data.items()})

    errors = [error_of(send), error_of(lambda: control and control.exchange("next"))]
    report = Path(folder, f"{rank}.json")
    report.with_suffix(".tmp").write_text(json.dumps([errors, time.monotonic() - started]))
    report.with_suffix(".tmp").rename(report)
    time.sleep(60)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("before", "RankError: meeting failed on rank 1: did not come to 'meeting' within 2 s"),
        ("inside", "RankError: send failed on rank 1: stopped in 'send' for 2 s"),
    ],
)
def test_a_stopped_rank_is_named_by_all_within_the_limit_of_the_call(tmp_path, step, error):
    reports = [tmp_path / f"{rank}.json" for rank in (0, 2, 3)]

    def end(process):
        wait_until(lambda: all(report.exists() for report in reports), what="the reports")
        end_tree(process)

    run_ranks(stops, 4, str(tmp_path), step, check=False, during=end)
    for report in reports:
        (first, second), seconds = json.loads(report.read_text())
        assert first == error
        assert second in (None, error)
        assert seconds < 15
