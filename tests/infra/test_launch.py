"""Ranks under real torchrun, and every way in which the process that started them can end."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distribute.errors import LaunchError, SourceError
from infra import launch
from infra.launch import (
    RankCommand,
    count_accelerators,
    default_nproc,
    make_environment,
    make_torchrun_argv,
    run_ranks,
)
from tests.infra.trees import FAKE, living, segments, wait_for, wait_for_tree


def script(folder: Path, text: str) -> list[str]:
    """A rank's program of standard library only (torchrun itself takes 3 s to import torch)."""
    path = folder / "rank.py"
    path.write_text(text)
    return [str(path)]


def use_fake(monkeypatch, folder: Path, *flags: str) -> RankCommand:
    argv = [sys.executable, "-I", "-S", str(FAKE), str(folder), *flags]
    monkeypatch.setattr(launch, "make_torchrun_argv", lambda command: argv)
    return RankCommand(args=(), folder=folder)


# What is built


def test_command_line():
    command = RankCommand(args=("-m", "distribute.worker", "/w/job.json"), folder=Path("/w"), nproc=3)
    argv = make_torchrun_argv(command, python="python")
    assert " ".join(argv[:10]) == (
        "python -P -m torch.distributed.run --standalone --local-addr=127.0.0.1 "
        "--nproc-per-node=3 --max-restarts=0 --log-dir=/dev/null --no-python"
    )
    assert argv[10:12] == ["/bin/sh", "-c"]
    assert argv[13:] == ["/w/logs", "python", "-P", "-u", "-m", "distribute.worker", "/w/job.json"]


def test_environment_is_scrubbed():
    base = {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "64",
        "RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "other", "MASTER_PORT": "29500", "PET_NNODES": "4",
        "SLURM_PROCID": "5", "PMI_RANK": "5", "OMPI_COMM_WORLD_RANK": "5", "TORCHELASTIC_RUN_ID": "x",
        "HF_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s", "PREFECT_API_KEY": "s",
    }  # fmt: skip
    made = make_environment(base, RankCommand(args=(), folder=Path("/w"), threads=2, env={"EXTRA": "1"}))
    assert made == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2", "EXTRA": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def test_default_nproc_without_torch(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: a)'\necho 'GPU 1: A (UUID: b)'\necho 'GPU 2: A (UUID: c)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert count_accelerators({}) == 3
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": "2,0"}) == 2
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == 1
    assert count_accelerators({"CUDA_VISIBLE_DEVICES": ""}) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert default_nproc() == min(2, len(os.sched_getaffinity(0)))


# Under real torchrun


def test_gloo_ranks_finish(tmp_path):
    rank = script(
        tmp_path,
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(float(dist.get_rank() + 1)); dist.all_reduce(total)\n"
        "print('sum', total.item()); print('err', file=sys.stderr); dist.destroy_process_group()\n",
    )
    lines, ticks = [], []
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = RankCommand(args=rank, folder=tmp_path, nproc=2, env={"TMPDIR": str(temporary)})
    record = run_ranks(command, on_line=lambda *line: lines.append(line), on_tick=lambda: ticks.append(1))
    assert (record.reason, record.exit_code, record.first_failure) == ("finished", 0, None)
    assert sorted(lines) == [(0, "err"), (0, "sum 3.0"), (1, "err"), (1, "sum 3.0")]
    assert command.log(1).read_text() == "sum 3.0\nerr\n"
    assert len(ticks) > 3
    assert not list(temporary.iterdir())  # torchrun's own folder of logs


def test_flood_is_followed_in_bounds_and_the_cause_is_told(tmp_path):
    rank = script(
        tmp_path,
        "import os, sys, time\n"
        "out = sys.stdout.buffer\n"
        "for i in range(200):\n"
        "    out.write(b''.join(b'calibrating batch %d\\n' % j for j in range(1000)))\n"
        "out.write(b'x' * 3_000_000 + b'\\n\\xff\\xfe\\n'); out.flush()\n"
        "if os.environ['RANK'] == '0': time.sleep(60)\n"
        "raise RuntimeError('THE CAUSE')\n",
    )
    lines = []
    command = RankCommand(args=rank, folder=tmp_path, nproc=2)
    with pytest.raises(LaunchError) as caught:
        run_ranks(command, on_line=lambda *line: lines.append(line))
    assert "rank 1 failed" in str(caught.value) and str(command.log(1)) in str(caught.value)
    assert "RuntimeError: THE CAUSE" in caught.value.__notes__[0]
    assert len(lines) <= 500
    assert max(len(text) for _, text in lines) < 2100
    assert (1, "RuntimeError: THE CAUSE") in lines
    assert any("lines not shown, full log" in text for rank, text in lines if rank == 0)
    assert command.log(1).read_bytes().count(b"calibrating") == 200_000


def test_two_jobs_at_once_both_start(tmp_path):
    rank_text = (
        "import os, pathlib, socket, time\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "socket.create_connection((os.environ['MASTER_ADDR'], port)).close()\n"
        "here = pathlib.Path(__file__).parent; (here / 'port').write_text(str(port))\n"
        "limit = time.monotonic() + 40\n"
        "while len(list(here.parent.glob('*/port'))) < 2 and time.monotonic() < limit: time.sleep(0.05)\n"
        "assert len(list(here.parent.glob('*/port'))) == 2\n"
    )
    with socket.socket() as taken:  # torchrun's usual port
        try:
            taken.bind(("", 29500))
            taken.listen()
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
        threads, records = [], {}
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            command = RankCommand(args=script(folder, rank_text), folder=folder)
            thread = threading.Thread(target=lambda c=command: records.update({c.folder.name: run_ranks(c)}))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
    assert {name: record.reason for name, record in records.items()} == {"a": "finished", "b": "finished"}
    assert (tmp_path / "a/port").read_text() != (tmp_path / "b/port").read_text()


def test_stuck_rank_does_not_hold_up_a_failure(tmp_path):
    rank = script(
        tmp_path,
        "import json, os, pathlib, signal, sys, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN); (here / 'deaf').touch(); time.sleep(100)\n"
        "while not (here / 'deaf').exists(): time.sleep(0.05)\n"
        "record = dict(rank=1, kind='user', type='SourceError', message='no such model', traceback='T', time=time.time())\n"
        "(here / 'error-1.json').write_text(json.dumps(record)); sys.exit(2)\n",
    )
    began = time.monotonic()
    with pytest.raises(SourceError, match=r"^no such model$"):
        run_ranks(RankCommand(args=rank, folder=tmp_path, nproc=2))
    assert time.monotonic() - began < 25  # torchrun alone waits 30 s for the other rank
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record["first_failure"]["rank"] == 1 and record["first_failure"]["exit_code"] == 2
    assert record["leftovers_killed"] == 1


# With a launcher that ends nothing itself


class Cancelled(BaseException):
    """As Prefect's own are."""


@pytest.mark.parametrize("error", [Cancelled, KeyboardInterrupt, RuntimeError])
def test_any_exception_ends_the_ranks(monkeypatch, tmp_path, error):
    command = use_fake(monkeypatch, tmp_path)
    pids = set()

    def tick():
        if (tmp_path / "pids").exists():
            pids.update(wait_for_tree(tmp_path))
            raise error

    with pytest.raises(error):
        run_ranks(command, on_tick=tick)
    assert len(pids) == 5
    assert living(pids) == set()
    assert segments(pids) == []


def test_stall_and_deadline_are_explained(monkeypatch, tmp_path):
    command = use_fake(monkeypatch, tmp_path)

    def tick():
        if not (tmp_path / "progress-1.json").exists():
            state = {"label": "encode", "done": 4, "total": 10, "unit": "tensors"}
            (tmp_path / "progress-1.json").write_text(json.dumps(state))

    with pytest.raises(LaunchError, match=r"no rank made progress .*rank 1: encode 4/10 tensors.*logs"):
        run_ranks(command, stall_s=1, on_tick=tick)
    with pytest.raises(LaunchError, match=r"ended after \d+ s, the limit of this stage"):
        run_ranks(command, deadline_s=1)
    assert living({int(path.name) for path in tmp_path.glob("pids/*")}) == set()


def test_failing_launcher_is_told(monkeypatch, tmp_path):
    argv = ["/bin/sh", "-c", "echo unknown option; exit 7"]
    monkeypatch.setattr(launch, "make_torchrun_argv", lambda command: argv)
    with pytest.raises(LaunchError, match=f"torchrun failed: exit code 7; logs: {tmp_path}/logs") as caught:
        run_ranks(RankCommand(args=(), folder=tmp_path))
    assert "unknown option" in caught.value.__notes__[0]


def test_killed_supervisor_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "make_torchrun_argv", lambda command: ["/bin/sh", "-c", "kill -9 $PPID"])
    with pytest.raises(LaunchError, match="the supervisor died"):
        run_ranks(RankCommand(args=(), folder=tmp_path))


def test_earlier_run_is_not_taken_for_this_one(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "make_torchrun_argv", lambda command: ["/bin/sh", "-c", "exit 1"])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.exit").write_text("9")
    (tmp_path / "logs/rank-0.log").write_text("old")
    (tmp_path / "progress-0.json").write_text("{}")
    error = {"rank": 0, "kind": "user", "type": "SourceError", "message": "old", "traceback": "", "time": 0}
    (tmp_path / "error-0.json").write_text(json.dumps(error))
    with pytest.raises(LaunchError, match="torchrun failed"):
        run_ranks(RankCommand(args=(), folder=tmp_path))
    assert (tmp_path / "logs-previous/rank-0.log").read_text() == "old"


DRIVER = """
import fcntl, os, signal, sys
from pathlib import Path
from infra import launch
folder, fake = Path(sys.argv[1]), sys.argv[2]
launch.make_torchrun_argv = lambda command: [sys.executable, "-I", "-S", fake, str(folder), "--deaf"]
class Cancelled(BaseException): pass
def cancel(*_): raise Cancelled
signal.signal(signal.SIGTERM, cancel)
signal.signal(signal.SIGINT, signal.default_int_handler)
lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
launch.run_ranks(launch.RankCommand(args=(), folder=folder), lock_fd=lock)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_end_of_the_flow_process_ends_everything(tmp_path, number):
    driver = [sys.executable, "-c", DRIVER, str(tmp_path), str(FAKE)]
    process = subprocess.Popen(driver, stderr=subprocess.DEVNULL)
    pids = wait_for_tree(tmp_path)
    lock = os.open(tmp_path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait()
        assert wait_for(lambda: not living(pids), seconds=10)
        fcntl.flock(lock, fcntl.LOCK_EX)  # free once the supervisor is gone
    assert process.wait(10) != 0
    assert living(pids) == set()
    assert segments(pids) == []
    assert json.loads((tmp_path / "exit.json").read_text())["reason"] == "parent_gone"
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
