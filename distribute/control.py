"""Control traffic: small JSON records and failures, exchanged among a fixed list of ranks over gloo on the CPU.

`Control.exchange` is the only rendezvous: barriers, gathers and the ends of steps are all made of it. So the
report of a rank that failed always meets whatever its peers wait in next, and every rank raises the same error
instead of waiting for one that will never come. The group is our own: its limit is hours, because a peer may be
writing files, and has nothing to do with the limit of the caller's compute group.

Never carries tensors of a model, never pickles.
"""

import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from distribute.errors import BY_NAME, NogatherError, RankError, UserError

log = logging.getLogger(__name__)

WAIT_LIMIT_VARIABLE = "NOGATHER_WAIT_LIMIT_S"  # seconds a rank waits for its peers, for callers without Ranks
WAIT_LIMIT_S = 6 * 3600.0
HEARTBEAT_S = 60.0
LONGEST_POLL_S = 0.02


class Control:
    """The control group of some ranks. Works alone, without a process group.

    `members` are global ranks in ascending order.
    """

    def __init__(self, rank: int, members: tuple[int, ...], store: dist.Store | None, limit_s: float):
        self.rank = rank
        self.members = members
        self.limit_s = limit_s
        self._store = store
        self._gloo: Any = None  # a ProcessGroupGloo; its collectives are not in torch's type stubs
        if store is not None:
            # Not dist.new_group: all ranks would have to call it, or (use_local_synchronization) the members must
            # have made equally many groups before, since torch takes their number into the name they meet by.
            place, limit = members.index(rank), timedelta(seconds=limit_s)
            self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), place, len(members), limit)
        self._exchanges = 0
        self._lost: RankError | None = None
        self._agreed: weakref.ref[Exception] | None = None  # weak: an error keeps whole frames alive

    @classmethod
    def of(cls, ranks: Sequence[int], *, limit_s: float | None = None) -> "Control":
        """The control group of `ranks`; made once, by the first call. Called by all of `ranks`, in any order of them.

        Raises:
            UserError: this rank is not in `ranks`, a rank is named twice, or there is no process group to join.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        members = tuple(sorted(ranks))
        _check_members(rank, members)
        limit_s = limit_s if limit_s is not None else float(os.environ.get(WAIT_LIMIT_VARIABLE, WAIT_LIMIT_S))
        if len(members) == 1:
            return cls(rank, members, None, limit_s)
        world = dist.group.WORLD
        if _cache.world is not world:  # a new process group: the store of the old one is gone
            _cache.world, _cache.controls = world, {}
        if members not in _cache.controls:
            assert world is not None
            store = dist.PrefixStore(f"nogather/control/{members}", world.get_group_store())
            _cache.controls[members] = cls(rank, members, store, limit_s)
        return _cache.controls[members]

    @staticmethod
    def close_all() -> None:
        """Close the connections of every control group, so that peers that wait for this rank learn it has left."""
        for control in _cache.controls.values():
            control._gloo = None
        _cache.world, _cache.controls = None, {}

    def exchange(self, step: str, payload: Any = None, *, error: Exception | None = None) -> dict[int, Any]:
        """Every member's JSON payload by rank. Called by all members; `error` says that this one failed.

        Raises:
            NogatherError: the same on every member, when one of them reports an error, is at another step, ended,
                or did not come within the limit. A UserError is raised as it is, since it is the cause.
        """
        report = {"step": step, "payload": payload, "error": _describe(error) if error else None}
        reports = dict(zip(self.members, map(json.loads, self._all_gather(json.dumps(report), step)), strict=True))
        failure = _agreed_error(reports)
        if failure is not None:
            self._agreed = weakref.ref(failure)
            raise failure from error
        return {rank: report["payload"] for rank, report in reports.items()}

    def call(self, step: str, work: Callable[[], Any]) -> dict[int, Any]:
        """Do `work` and exchange what it returns (JSON) or how it failed. Called by all members."""
        payload, failure = None, None
        try:
            payload = work()
        except Exception as error:
            failure = error
        return self.exchange(step, payload, error=failure)

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """A step that succeeds on all members or raises the same error on all. Called by all members.

        The body may use this very control group, but no other collective: a failing rank would not take part.
        """
        failure = None
        try:
            yield
        except Exception as error:
            if self._agreed is not None and self._agreed() is error:
                raise  # every member has this error already: nobody is left to tell
            failure = error
        self.exchange(step, error=failure)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """In place, element-wise max of an integer CPU tensor. Called by all members, right after an exchange."""
        if len(self.members) > 1:
            assert self._gloo is not None, "closed"
            self._wait(self._gloo.allreduce(tensor, dist.ReduceOp.MAX), "all_reduce_max")

    def _all_gather(self, text: str, step: str) -> list[str]:
        if len(self.members) == 1:
            return [text]
        if self._lost is not None:
            raise RankError(self._lost.step, self._lost.reasons)
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self._exchanges += 1
        started = time.monotonic()
        try:
            self._set_arrived()
            sizes = [size.item() for size in self._gather_equal(torch.tensor([data.numel()], device="cpu"), step)]
            padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device="cpu")
            padded[: data.numel()] = data
            rows = self._gather_equal(padded, step)
        except RuntimeError as error:
            self._lost = self._find_lost(step, error, time.monotonic() - started)
            self._agreed = weakref.ref(self._lost)
            raise self._lost from error
        return [row.numpy()[: int(size)].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def _gather_equal(self, tensor: torch.Tensor, step: str) -> list[torch.Tensor]:
        assert self._gloo is not None, "closed"
        rows = [torch.empty_like(tensor) for _ in self.members]
        self._wait(self._gloo.allgather(rows, tensor), step)
        return rows

    def _wait(self, work: Any, step: str) -> None:
        """Wait without blocking, so that the log shows once a minute for whom. Gloo ends it at the limit."""
        started, beat = time.monotonic(), HEARTBEAT_S
        while not work.is_completed():
            waited = time.monotonic() - started
            if waited >= beat:
                log.warning("rank %d has waited %.0f s at %r for ranks %s", self.rank, waited, step, self._absent())
                beat += HEARTBEAT_S
            time.sleep(min(LONGEST_POLL_S, 0.0002 + waited / 10))
        work.wait()

    def _set_arrived(self) -> None:
        assert self._store is not None
        self._store.set(f"arrived/{self.rank}", str(self._exchanges))

    def _absent(self) -> list[int]:
        """Members that have not come to the present exchange."""
        assert self._store is not None
        keys = {rank: f"arrived/{rank}" for rank in self.members}
        known = {rank: int(self._store.get(key)) if self._store.check([key]) else 0 for rank, key in keys.items()}
        return [rank for rank, exchanges in known.items() if exchanges < self._exchanges]

    def _find_lost(self, step: str, error: RuntimeError, waited_s: float) -> RankError:
        """Who is missing. The first rank to find out leaves its finding in the store, so that all say the same."""
        late = waited_s >= self.limit_s
        reason = f"did not come to {step!r} within {self.limit_s:g} s" if late else f"ended before {step!r}"
        finding = RankError(step, {self.rank: f"lost its peers: {_one_line(error)}"})
        assert self._store is not None
        try:
            if absent := self._absent():
                finding = RankError(step, dict.fromkeys(absent, reason))
            text = self._store.compare_set("lost", "", json.dumps(_describe(finding)))
            return _rebuild(json.loads(text))  # type: ignore[return-value]
        except RuntimeError:  # the store is gone as well: its host ended
            return finding


class _Cache:
    """Control groups of the present process group: making one costs a rendezvous of its members."""

    world: Any = None
    controls: dict[tuple[int, ...], Control] = {}  # noqa: RUF012  one a process, like the process group itself


_cache = _Cache()


def _check_members(rank: int, members: tuple[int, ...]) -> None:
    if len(set(members)) != len(members):
        raise UserError(f"ranks {list(members)} name a rank twice; name each rank once")
    if rank not in members:
        raise UserError(f"rank {rank} is not one of ranks {list(members)}; call this on these ranks only")
    if len(members) > 1 and not dist.is_initialized():
        raise UserError(
            f"ranks {list(members)} need a process group; call torch.distributed.init_process_group first"
        )


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _describe(error: Exception) -> dict[str, Any]:
    """An error as JSON; `type` is the nearest class that the other side knows."""
    if isinstance(error, RankError):
        return {"type": "RankError", "step": error.step, "reasons": {str(k): v for k, v in error.reasons.items()}}
    known = next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in BY_NAME), None)
    return {"type": known, "text": str(error), "line": _one_line(error)}


def _rebuild(record: Mapping[str, Any]) -> NogatherError:
    if record["type"] == "RankError":
        return RankError(record["step"], {int(rank): reason for rank, reason in record["reasons"].items()})
    return BY_NAME[record["type"]](record["text"])


def _agreed_error(reports: Mapping[int, Mapping[str, Any]]) -> NogatherError | None:
    """The one error that all ranks raise for these reports; None when all is well. Pure."""
    errors = {rank: report["error"] for rank, report in reports.items() if report["error"]}
    if not errors:
        steps = {rank: f"is at {report['step']!r}" for rank, report in reports.items()}
        return RankError("meeting at one step", steps) if len(set(steps.values())) > 1 else None
    first = min(errors)
    for error in errors.values():
        if error["type"] in BY_NAME and issubclass(BY_NAME[error["type"]], UserError):
            return _rebuild(error)
    if errors[first]["type"] and all(error == errors[first] for error in errors.values()):
        return _rebuild(errors[first])
    reasons = {rank: error.get("line") or str(_rebuild(error)) for rank, error in errors.items()}
    return RankError(reports[first]["step"], reasons)
