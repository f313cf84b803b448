"""Control traffic: small JSON records and failures, exchanged among a fixed list of ranks over gloo on the CPU.

`Control.exchange` is the only rendezvous: barriers, gathers and the ends of steps are all made of it. So the
report of a rank that failed always meets whatever its peers wait in next, and every rank raises the same error
instead of waiting for one that will never come. The group is our own: its limit is hours, because a peer may be
writing files, and has nothing to do with the limit of the caller's compute group.

Tensors of a model travel by `transfer` alone, where no shared memory or file does; nothing is ever pickled.
"""

import json
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distribute.channel import Channel
from distribute.errors import BY_NAME, NogatherError, RankError, UserError

WAIT_LIMIT_VARIABLE = "NOGATHER_WAIT_LIMIT_S"  # seconds a rank waits for its peers, for callers without Ranks
WAIT_LIMIT_S = 6 * 3600.0


class Control:
    """The control group of some ranks. Works alone, without a process group.

    One for each call that needs another `limit_s`; those of the same ranks and group share one channel.
    """

    def __init__(self, channel: Channel, limit_s: float):
        self.limit_s = limit_s
        self._channel = channel

    @classmethod
    def of(
        cls,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None = None,
        *,
        limit_s: float | None = None,
        step: str = "meeting",
    ) -> "Control":
        """The control group of `ranks`. Called by all of `ranks`, in any order of them; the first call connects them.

        Threads that call at the same time need a `group` each, as for any collective of torch.

        Args:
            ranks: global ranks.
            group: a process group of exactly these ranks; only its name is used. None: the default group.
            limit_s: how long to wait for a peer (None: NOGATHER_WAIT_LIMIT_S, or six hours).
            step: what the ranks meet for, for messages.

        Raises:
            UserError: this rank is not in `ranks`, a rank is named twice, the group has other members, there is no
                process group to join, or the limit is no positive number.
            RankError: a rank did not come.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        members = tuple(sorted(ranks))
        _check_members(rank, members, group)
        limit_s = limit_s if limit_s is not None else float(os.environ.get(WAIT_LIMIT_VARIABLE, WAIT_LIMIT_S))
        if not 0 < limit_s < math.inf:
            raise UserError(f"the limit of a wait is {limit_s:g} s; give seconds, more than 0")
        if len(members) == 1:
            return cls(Channel(rank, members), limit_s)
        world: Any = dist.group.WORLD
        if _cache.world is not world:  # a new process group: the store of the old one is gone
            _cache.world, _cache.channels = world, {}
        key = (members, "" if group is None or group is world else group.group_name)
        if key not in _cache.channels:
            # A clone: a store serves one thread at a time, and one that waits would hold up all others.
            store = dist.PrefixStore(f"nogather/control/{key}", world.get_group_store().clone())
            channel = Channel(rank, members, store)
            _cache.channels[key] = channel
            channel.connect(step, limit_s)
        return cls(_cache.channels[key], limit_s)

    @staticmethod
    def close_all() -> None:
        """Close the connections of every control group, so that peers that wait for this rank learn it has left."""
        for channel in _cache.channels.values():
            channel.close()
        _cache.world, _cache.channels = None, {}

    @property
    def rank(self) -> int:
        """This process."""
        return self._channel.rank

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks in ascending order."""
        return self._channel.members

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to its peers so far, records and tensors, through this and equal groups."""
        return self._channel.bytes_sent

    def exchange(self, step: str, payload: Any = None, *, error: Exception | None = None) -> dict[int, Any]:
        """Every member's JSON payload by rank. Called by all members; `error` says that this one failed.

        Raises:
            NogatherError: the same on every member, when one of them reports an error, is at another step, ended,
                or did not come within the limit. A UserError is raised as it is, since it is the cause.
        """
        report = {"step": step, "payload": payload, "error": _describe(error) if error else None}
        texts = self._channel.all_gather(json.dumps(report).encode(), step, self.limit_s)
        reports = dict(zip(self.members, map(json.loads, texts), strict=True))
        failure = _agreed_error(reports)
        if failure is not None:
            self._channel.agreed = weakref.ref(failure)
            raise failure from error
        return {rank: report["payload"] for rank, report in reports.items()}

    def transfer(self, step: str, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Fill the tensors of `receives` with those that the peers send here. Called by all members.

        Begins with an exchange, so that a member that failed before is heard of.

        Args:
            sends: contiguous uint8 CPU tensors by the global rank they go to; this rank itself is allowed.
            receives: the same by the rank they come from; a tensor for every one that is sent, of its size.

        Raises:
            NogatherError: as `exchange`, before and during the transfer.
        """
        totals = self.call(step, partial(_totals, sends, receives)).values()
        sent, received = (sum(total) for total in zip(*totals, strict=True))
        assert sent == received, f"{step}: {sent} bytes are sent, but {received} are expected"
        if self.rank in receives:
            receives[self.rank].copy_(sends[self.rank])
        if sent and len(self.members) > 1:
            others = [{p: t for p, t in side.items() if p != self.rank and t.numel()} for side in (sends, receives)]
            self._channel.transfer(others[0], others[1], step, self.limit_s)

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
            if self._channel.agreed is not None and self._channel.agreed() is error:
                raise  # every member has this error already: nobody is left to tell
            failure = error
        self.exchange(step, error=failure)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """In place, element-wise max of an integer CPU tensor. Called by all members, right after an exchange."""
        self._channel.all_reduce_max(tensor, "all_reduce_max", self.limit_s)


class _Cache:
    """Channels of the present process group: making one costs a rendezvous of its members."""

    world: Any = None
    channels: dict[tuple[tuple[int, ...], str], Channel] = {}  # noqa: RUF012  one a process, like the group itself


_cache = _Cache()


def _check_members(rank: int, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
    if len(set(members)) != len(members):
        raise UserError(f"ranks {list(members)} name a rank twice; name each rank once")
    if rank not in members:
        raise UserError(f"rank {rank} is not one of ranks {list(members)}; call this on these ranks only")
    if len(members) > 1 and not dist.is_initialized():
        raise UserError(
            f"ranks {list(members)} need a process group; call torch.distributed.init_process_group first"
        )
    if group is not None:
        given = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
        if set(given) != set(members):
            raise UserError(f"the given group has ranks {given}, which must be the same as ranks {list(members)}")


def _totals(*sides: Mapping[int, torch.Tensor]) -> list[int]:
    for tensor in (tensor for side in sides for tensor in side.values()):
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.device.type == "cpu"
    return [sum(tensor.numel() for tensor in side.values()) for side in sides]


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
