"""A channel: bytes among a fixed list of ranks, over a gloo group of its own on the CPU.

Owns the connections, the limits of all waits, and the answer to who is missing. A rank that loses a peer says in the
group's store whom, then drops its connections: so the loss reaches at once also those that wait for somebody else,
and all of them name the same ranks. Knows nothing of what the bytes mean; never pickles.
"""

import json
import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from distribute.errors import RankError

log = logging.getLogger(__name__)

HEARTBEAT_S = 60.0
LONGEST_POLL_S = 0.02
INLINE_BYTES = 1016  # longer records take a second round
NOTICE_S = 1.0  # how long ranks that live need, at most, to notice that another one dropped its connections
TAG, PROBE_TAG = 1, 2


class Channel:
    """Connections of this rank to the other `members` (global ranks, ascending). Alone it needs no store.

    Every method but `close` is called by all members, and raises RankError, the same on all of them, when one ended,
    stopped or did not come within `limit_s` seconds; the channel cannot be used any more then.
    """

    def __init__(self, rank: int, members: tuple[int, ...], store: dist.Store | None = None):
        self.rank = rank
        self.members = members
        self.bytes_sent = 0
        self._store = store
        self._gloo: Any = None  # a ProcessGroupGloo; its collectives are not in torch's type stubs
        self._meetings = 0
        self._lost: RankError | None = None
        self.agreed: weakref.ref[Exception] | None = None  # every member has it; weak: it keeps whole frames alive

    def connect(self, step: str, limit_s: float) -> None:
        """Make the connections."""
        if len(self.members) == 1:
            return
        with self._meeting(step, limit_s):
            assert self._store is not None
            self._await_all("here", step, limit_s)
            # Not dist.new_group: all ranks would have to call it, or (use_local_synchronization) the members must
            # have made equally many groups before, since torch takes their number into the name they meet by.
            store, place = dist.PrefixStore("gloo", self._store), self.members.index(self.rank)
            self._gloo = dist.ProcessGroupGloo(store, place, len(self.members), timedelta(seconds=limit_s))
            # A rank that ended while another still connects to it would not be missed before the limit.
            self._await_all("connected", step, limit_s)

    def close(self) -> None:
        """Drop the connections: peers that wait for this rank learn that it has left."""
        self._gloo = None

    def all_gather(self, data: bytes, step: str, limit_s: float) -> list[bytes]:
        """What every member gave, in the order of `members`."""
        if len(self.members) == 1:
            return [data]
        with self._meeting(step, limit_s):
            head = len(data).to_bytes(8, "little") + data[:INLINE_BYTES]
            heads = self._gather_equal(head, 8 + INLINE_BYTES, step, limit_s)
            sizes = [int.from_bytes(row[:8], "little") for row in heads]
            if max(sizes) <= INLINE_BYTES:
                return [row[8 : 8 + size] for row, size in zip(heads, sizes, strict=True)]
            rows = self._gather_equal(data, max(sizes), step, limit_s)
            return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def all_reduce_max(self, tensor: torch.Tensor, step: str, limit_s: float) -> None:
        """In place, element-wise max of an integer CPU tensor."""
        others = len(self.members) - 1
        if others:
            with self._meeting(step, limit_s):
                options = AllreduceOptions()
                options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.MAX), timedelta(seconds=limit_s)
                self._wait(self._gloo.allreduce([tensor], options), step)
            self.bytes_sent += 2 * others * tensor.nbytes // (others + 1)  # a ring: reduced, then passed round

    def transfer(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], step: str, limit_s: float
    ) -> None:
        """Fill `receives` with what peers send. Sizes must be agreed on; no rank sends to itself."""
        with self._meeting(step, limit_s):
            works = [(peer, self._gloo.recv([item], self._place(peer), TAG)) for peer, item in receives.items()]
            works += [(peer, self._gloo.send([item], self._place(peer), TAG)) for peer, item in sends.items()]
            deadline = time.monotonic() + limit_s
            try:
                for _, work in works:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            finally:
                works.clear()  # a work keeps the connections, and the traceback of an error would keep the work
                work = None
        self.bytes_sent += sum(item.nbytes for item in sends.values())

    def _place(self, peer: int) -> int:
        return self.members.index(peer)

    def _gather_equal(self, data: bytes, size: int, step: str, limit_s: float) -> list[bytes]:
        assert self._gloo is not None, "closed"
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in self.members]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=limit_s)
        self._wait(self._gloo.allgather([rows], [mine], options), step)
        self.bytes_sent += size * (len(self.members) - 1)
        return [row.numpy().tobytes() for row in rows]

    def _wait(self, work: Any, step: str) -> None:
        """Wait without blocking, so that the log shows once a minute for whom. Gloo ends it at the limit."""
        started, beat = time.monotonic(), HEARTBEAT_S
        try:
            while not work.is_completed():
                waited = time.monotonic() - started
                if waited >= beat:
                    self._warn(waited, step)
                    beat += HEARTBEAT_S
                time.sleep(min(LONGEST_POLL_S, waited / 50))  # a few yields at first: peers mostly come together
            work.wait()
        finally:
            del work  # as in `transfer`

    def _await_all(self, place: str, step: str, limit_s: float) -> None:
        """Wait until all members have come to a place in the store: so they meet before they are connected."""
        assert self._store is not None
        if self._store.add(place, 1) == len(self.members):
            self._store.set(f"all {place}", "")
        started, beat = time.monotonic(), HEARTBEAT_S
        while True:
            waited = time.monotonic() - started
            if waited >= limit_s or self._store.check(["lost"]):
                raise RuntimeError(f"ranks {self._absent()} have not come")
            if self._store.check([f"all {place}"]):
                return
            if waited >= beat:
                self._warn(waited, step)
                beat += HEARTBEAT_S
            time.sleep(min(0.2, 0.002 + waited / 10))

    def _warn(self, waited: float, step: str) -> None:
        log.warning("rank %d has waited %.0f s at %r for ranks %s", self.rank, waited, step, self._absent())

    @contextmanager
    def _meeting(self, step: str, limit_s: float) -> Iterator[None]:
        """One collective: says that this rank has come, and finds out who is missing when the body fails."""
        if self._lost is not None:
            raise RankError(self._lost.step, self._lost.reasons)
        assert self._store is not None
        started = time.monotonic()
        self._meetings += 1
        try:
            self._store.set(f"arrived/{self.rank}", str(self._meetings))
            yield
        except BaseException as error:
            self._lost = self._find_lost(step, error, limit_s, time.monotonic() - started >= limit_s)
            self._gloo, self.agreed = None, weakref.ref(self._lost)
            if not isinstance(error, Exception):
                raise  # an interrupt; the peers must not wait for this rank, which is not in step any more
            raise self._lost from error

    def _find_lost(self, step: str, error: BaseException, limit_s: float, late: bool) -> RankError:
        """Who is missing. One rank finds out and leaves its finding in the store, so that all say the same."""
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        finding = {str(self.rank): f"lost its peers: {reason}"}
        assert self._store is not None
        try:
            if not isinstance(error, RuntimeError):  # not what gloo and the store raise: the fault is here
                return self._announce(step, {str(self.rank): reason})
            # Before it drops its connections, so that they are not taken for those of a rank that ended.
            if self._store.compare_set("finder", "", str(self.rank)) == str(self.rank).encode():
                finding = self._find(step, limit_s, late)
            else:
                self._store.set(f"noticed/{self.rank}", "")
                self._gloo = None
                self._store.wait(["lost"], timedelta(seconds=2 * NOTICE_S))
            return self._announce(step, finding)
        except RuntimeError:  # the store is gone as well, since its host ended, or the finder is
            return _rank_error(step, finding)

    def _find(self, step: str, limit_s: float, late: bool) -> dict[str, str]:
        """Rank -> reason, as this rank sees it."""
        absent = self._absent()
        if late:
            # Who waits in an earlier step for the same rank has not come either, but notices.
            silent = self._silent()
            found = [rank for rank in absent if rank in silent] or absent or silent
        else:
            found = self._ended() or absent or self._silent()
        came = f"stopped in {step!r} for {limit_s:g} s" if late else f"ended in {step!r}"
        missed = f"did not come to {step!r} within {limit_s:g} s" if late else f"ended before {step!r}"
        return {str(rank): missed if rank in absent else came for rank in found}

    def _announce(self, step: str, finding: Mapping[str, str]) -> RankError:
        assert self._store is not None
        return _rank_error(*json.loads(self._store.compare_set("lost", "", json.dumps([step, finding]))))

    def _absent(self) -> list[int]:
        """Members that have not come to the present meeting."""
        assert self._store is not None
        keys = {rank: f"arrived/{rank}" for rank in self.members}
        known = {rank: int(self._store.get(key)) if self._store.check([key]) else 0 for rank, key in keys.items()}
        return [rank for rank, meetings in known.items() if meetings < self._meetings]

    def _ended(self) -> list[int]:
        """Members to which the connection is broken; one that is only busy with something else keeps it."""
        ended = []
        for rank in self.members if self._gloo is not None else ():
            try:
                if rank != self.rank:
                    self._gloo.send([torch.zeros(1, dtype=torch.uint8)], self._place(rank), PROBE_TAG)
            except RuntimeError:
                ended.append(rank)
        # Not those that lost a peer themselves: they say so before they drop their connections.
        return [rank for rank in ended if not self._noticed(rank)]

    def _noticed(self, rank: int) -> bool:
        assert self._store is not None
        return bool(self._store.check([f"noticed/{rank}"]))

    def _silent(self) -> list[int]:
        """Members that had come, but do not notice that the others drop their connections."""
        assert self._store is not None
        self._store.set(f"noticed/{self.rank}", "")
        self._gloo = None
        deadline = time.monotonic() + NOTICE_S
        while missing := [rank for rank in self.members if not self._noticed(rank)]:
            if time.monotonic() >= deadline or self._store.check(["lost"]):
                break
            time.sleep(LONGEST_POLL_S)
        return missing


def _rank_error(step: str, finding: Mapping[str, str]) -> RankError:
    return RankError(step, {int(rank): reason for rank, reason in finding.items()})
