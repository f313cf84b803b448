"""Ranks alone and under torchrun: meeting, agreeing on failures, waiting for long I/O."""

import logging
import os
import time

import pytest
import torch
import torch.distributed as dist

from distribute import channel
from distribute.control import Control
from distribute.errors import RankError, SourceError, UserError, VerifyError
from distribute.ranks import Ranks
from tests.torchrun import run_ranks

NAN_FIRST = [float("nan"), 1.0, -3.0, 0.0, float("inf")]
NAN_SECOND = [2.0, float("nan"), 2.5, -0.0, 1.0]


@pytest.fixture
def alone():
    return Ranks.start()


def test_starts_alone_without_torchrun(alone):
    assert (alone.rank, alone.world, alone.local_rank, alone.is_first) == (0, 1, 0, True)
    assert alone.group is None
    assert not dist.is_initialized()


def test_alone_uses_the_same_methods(alone):
    alone.barrier()
    assert alone.share({"a": [1, None]}) == {"a": [1, None]}
    record = {"x": torch.arange(3)}
    assert alone.gather(record) == [record]
    assert alone.absmax(torch.tensor([-2.0, 1.0])).tolist() == [2.0, 1.0]
    with alone.together("step"):
        pass


def test_together_alone_raises_what_many_would_raise(alone):
    with pytest.raises(RankError) as caught, alone.together("encode"):
        raise OSError(28, "No space left on device")
    assert caught.value.step == "encode"
    assert caught.value.reasons == {0: "OSError: [Errno 28] No space left on device"}
    assert isinstance(caught.value.__cause__, OSError)


def test_together_keeps_the_class_of_own_errors(alone):
    with pytest.raises(SourceError, match=r"^bad source$"), alone.together("outer"), alone.together("inner"):
        raise SourceError("bad source")
    with pytest.raises(VerifyError), alone.together("verify"):
        raise VerifyError("differs")


def test_interrupt_passes_through_together(alone):
    with pytest.raises(KeyboardInterrupt), alone.together("step"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_absmax_keeps_dtype_and_shape(alone, dtype):
    tensor = torch.tensor([[-1.5, 0.0], [2.25, -0.0]], dtype=dtype)
    result = alone.absmax(tensor)
    assert result.dtype == dtype
    assert result.tolist() == [[1.5, 0.0], [2.25, 0.0]]
    assert tensor[0, 0] == -1.5


def test_absmax_of_odd_tensors(alone):
    assert alone.absmax(torch.tensor(-3.0)).shape == ()
    assert alone.absmax(torch.zeros(0, 4)).shape == (0, 4)
    assert alone.absmax(torch.tensor([-128, 3], dtype=torch.int16)).tolist() == [128, 3]


def test_ranks_must_name_this_rank_once():
    with pytest.raises(UserError, match="rank 0 is not one of ranks"):
        Control.of([1])
    with pytest.raises(UserError, match="name a rank twice"):
        Control.of([0, 0])
    with pytest.raises(UserError, match="init_process_group first"):
        Control.of([0, 1])


@pytest.mark.parametrize("limit_s", [0, -1, float("inf"), float("nan")])
def test_a_limit_must_be_seconds(limit_s):
    with pytest.raises(UserError, match="give seconds, more than 0"):
        Ranks.start(wait_limit_s=limit_s)


def _caught(body):
    """The error `body` raises, as JSON."""
    try:
        body()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "reasons": getattr(error, "reasons", None)}
    return None


def meets():
    """Everything that works between ranks, then every way to fail; one job, because a start is slow."""
    with Ranks.start(compute_limit_s=5) as ranks:
        first = ranks.is_first
        found = {"place": [ranks.rank, ranks.world, ranks.local_rank, dist.get_backend(ranks.group)]}
        found["share"] = ranks.share({"from": ranks.rank})
        found["long"] = len(ranks.share("x" * 100_000 if first else None))
        bits = ranks.absmax(torch.tensor(NAN_FIRST if first else NAN_SECOND)).view(torch.int32)
        found["absmax"] = bits.tolist()
        found["bf16"] = ranks.absmax(torch.tensor([1.0, -4.0] if first else [-2.0, 3.0]).bfloat16()).tolist()
        found["empty"] = list(ranks.absmax(torch.zeros(2, 0)).shape)
        records = ranks.gather({"rank": ranks.rank, "rows": torch.full((2,), float(ranks.rank))})
        found["gather"] = [[record["rank"], record["rows"].tolist()] for record in records]
        found["nones"] = ranks.gather(None)

        found["shapes differ"] = _caught(lambda: ranks.absmax(torch.zeros(2 if first else 3)))
        found["one fails"] = _caught(lambda: _fail(ranks, OSError(28, "No space left on device"), 1))
        found["both fail"] = _caught(lambda: _fail(ranks, ValueError(f"bad {ranks.rank}"), 0, 1))
        found["user error"] = _caught(lambda: _fail(ranks, SourceError("shard 2 is cut short"), 1))
        found["mixed"] = _caught(
            lambda: _fail(ranks, OSError("late") if first else SourceError("shard 2 is cut short"), 0, 1)
        )
        found["same stage error"] = _caught(lambda: _fail(ranks, VerifyError("differs"), 0, 1))
        found["inside"] = _caught(lambda: _fail_while_peer_waits(ranks))
        found["nested"] = _caught(lambda: _fail_nested(ranks))
        found["steps differ"] = _caught(ranks.barrier if first else lambda: ranks.share(None))
        ranks.barrier()  # after every failure the ranks still meet
        return found


def _fail(ranks, error, *failing):
    with ranks.together("encode"):
        if ranks.rank in failing:
            raise error


def _fail_while_peer_waits(ranks):
    with ranks.together("outer"):
        if ranks.rank == 1:
            raise OSError("disk gone")
        ranks.gather({"never": "arrives"})


def _fail_nested(ranks):
    with ranks.together("outer"), ranks.together("inner"):
        if ranks.rank == 1:
            raise OSError("disk gone")


def test_ranks_meet_and_fail_together():
    first, second = run_ranks(meets, 2)
    assert first.pop("place") == [0, 2, 0, "gloo"]
    assert second.pop("place") == [1, 2, 1, "gloo"]
    nan, infinity = 0x7FC00000, 0x7F800000
    assert first["absmax"][:2] == [nan, nan]
    assert first["absmax"][4] == infinity
    assert torch.tensor(first["absmax"][2:4], dtype=torch.int32).view(torch.float32).tolist() == [3.0, 0.0]
    assert first["bf16"] == [2.0, 4.0]
    assert first["empty"] == [2, 0]
    assert first["share"] == {"from": 0}
    assert first["long"] == 100_000
    assert first.pop("gather") == [[0, [0.0, 0.0]], [1, [1.0, 1.0]]]
    assert second.pop("gather") == []
    assert first.pop("nones") == [None, None]
    assert second.pop("nones") == []
    assert first == second, "every rank raises the same error"
    assert "given: {0: ['torch.float32', [2]], 1: ['torch.float32', [3]]}" in first["shapes differ"]["text"]
    assert first["one fails"] == {
        "type": "RankError",
        "text": "encode failed on rank 1: OSError: [Errno 28] No space left on device",
        "reasons": {"1": "OSError: [Errno 28] No space left on device"},
    }
    assert first["both fail"]["reasons"] == {"0": "ValueError: bad 0", "1": "ValueError: bad 1"}
    for case in ("user error", "mixed"):
        assert first[case] == {"type": "SourceError", "text": "shard 2 is cut short", "reasons": None}
    assert first["same stage error"]["type"] == "VerifyError"
    assert first["inside"]["text"] == "outer failed on rank 1: OSError: disk gone"
    assert first["nested"]["text"] == "inner failed on rank 1: OSError: disk gone"
    assert first["steps differ"]["reasons"] == {"0": "is at 'barrier'", "1": "is at 'share'"}


def waits(mode):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    channel.log.addHandler(handler)
    channel.HEARTBEAT_S = 1
    with Ranks.start(wait_limit_s=3600 if mode == "ends" else 4) as ranks:
        ranks.barrier()
        if not ranks.is_first:
            if mode == "ends":
                return "ended"
            time.sleep(8)
        return {"caught": _caught(ranks.barrier)["text"], "lines": lines}


def test_rank_that_does_not_come_is_named_by_all():
    waiting, late = run_ranks(waits, 2, "stuck")
    assert waiting["caught"] == late["caught"] == "barrier failed on rank 1: did not come to 'barrier' within 4 s"
    assert waiting["lines"][0] == "rank 0 has waited 1 s at 'barrier' for ranks [1]"
    assert len(waiting["lines"]) >= 2


def test_rank_that_ended_is_named_at_once():
    waiting, ended = run_ranks(waits, 2, "ends")
    assert ended == "ended"
    assert waiting["caught"] == "barrier failed on rank 1: ended before 'barrier'"


def joins_given_group(folder):
    worlds = []
    for number in range(2):  # control groups of the first group must not be used again with the second
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world)
        with Ranks.start() as ranks:
            worlds.append(ranks.share(ranks.world))
        dist.barrier()  # still there after the end of Ranks
        dist.destroy_process_group()
    return worlds


def test_group_of_the_caller_is_used_and_left(tmp_path):
    assert run_ranks(joins_given_group, 2, str(tmp_path)) == [[2, 2]] * 2
