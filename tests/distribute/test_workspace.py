"""NFSWorkspace: what is written is read bit for bit, or refused; never torn, stale or another run's."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors
import torch
import torch.distributed as dist

from distribute import NFSWorkspace, segments, state_file
from distribute.errors import UserError, WorkspaceError
from distribute.segments import new_name
from tests.distribute.test_state import NAMES, assert_same, odd_tensors
from tests.torchrun import ROOT, run_ranks

CONFIG = {"layers": [{"name": "a.b", "amax": 1.5, "none": None}], "ünïcødé": True, "sha256": "0" * 64}


def file_of(folder, rank):
    (path,) = folder.glob(f"rank_{rank}_state-*.safetensors")
    return path


@pytest.fixture
def workspace(tmp_path):
    return NFSWorkspace(tmp_path / "deep" / "workspace")


@pytest.fixture
def of_rank(tmp_path, monkeypatch):
    """A workspace as another rank of the same job makes it."""

    def make(rank):
        monkeypatch.setenv("RANK", str(rank))
        made = NFSWorkspace(tmp_path)
        monkeypatch.delenv("RANK")
        return made

    return make


def test_state_survives_bit_for_bit(workspace):
    weights = odd_tensors() | {name: torch.tensor([1]) for name in NAMES}
    workspace.write_configs_and_weights(CONFIG, weights)
    config, read = workspace.read_configs_and_weights_from_rank(0)
    assert config == CONFIG
    assert_same(read, weights)


def test_empty_state_survives(workspace):
    workspace.write_configs_and_weights({}, {})
    assert workspace.read_configs_and_weights_from_rank(0) == ({}, {})


def test_ranks_read_each_other(of_rank):
    first, second = of_rank(0), of_rank(1)
    assert first.read_configs_and_weights_from_rank(1) == (None, None)
    second.write_configs_and_weights({"rank": 1}, {})
    assert first.read_configs_and_weights_from_rank(1) == ({"rank": 1}, {})
    second.write_configs_and_weights({"rank": 1, "again": True}, {})
    assert first.read_configs_and_weights_from_rank(1) == ({"rank": 1, "again": True}, {})
    assert first.read_configs_and_weights_from_rank(0) == (None, None)


def test_construction_removes_this_ranks_earlier_state_only(of_rank):
    for rank in (0, 1):
        of_rank(rank).write_configs_and_weights({"rank": rank}, {})
    again = of_rank(0)
    assert again.read_configs_and_weights_from_rank(0) == (None, None)
    assert again.read_configs_and_weights_from_rank(1)[0] == {"rank": 1}


def test_without_path_every_method_is_refused():
    workspace = NFSWorkspace()
    assert not workspace.is_initialized
    with pytest.raises(ValueError, match="not initialized"):
        workspace.write_configs_and_weights({}, {})
    with pytest.raises(ValueError, match="not initialized"):
        workspace.read_configs_and_weights_from_rank(0)


@pytest.mark.parametrize("rank", [-1, "0", 1.0, True, None])
def test_a_rank_that_cannot_be_is_refused(workspace, rank):
    with pytest.raises(ValueError, match="there is no rank"):
        workspace.read_configs_and_weights_from_rank(rank)


def test_folder_and_file_are_private(workspace):
    workspace.write_configs_and_weights({}, {})
    assert workspace.is_initialized
    assert workspace.path.stat().st_mode & 0o777 == 0o700
    (file,) = workspace.path.iterdir()
    assert file == file_of(workspace.path, 0)
    assert file.stat().st_mode & 0o777 == 0o600


def test_permissions_of_an_existing_folder_stay(tmp_path):
    tmp_path.chmod(0o750)
    NFSWorkspace(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_file_is_plain_safetensors(workspace):
    workspace.write_configs_and_weights({"a": 1}, {"w": torch.tensor([3, 4])})
    with safetensors.safe_open(file_of(workspace.path, 0), "pt") as file:
        assert json.loads(file.metadata()["config"]) == {"a": 1}
        assert (file.metadata()["rank"], file.metadata()["generation"]) == ("0", "1")
        assert int(file.metadata()["size"]) == file_of(workspace.path, 0).stat().st_size
        assert file.get_tensor("w").tolist() == [3, 4]


def test_unfaithful_values_are_refused_and_keep_the_old_state(workspace):
    workspace.write_configs_and_weights({"old": 1}, {})
    for config, weights, text in [
        ({"a": {"b": [1, {2}]}}, {}, r"config_json\['a'\]\['b'\]\[1\] is a set"),
        ([1], {}, "config_json is a list"),
        ({}, {"c": torch.zeros(1, dtype=torch.complex64)}, "tensor 'c' of dtype torch.complex64"),
    ]:
        with pytest.raises(UserError, match=text):
            workspace.write_configs_and_weights(config, weights)
    assert workspace.read_configs_and_weights_from_rank(0) == ({"old": 1}, {})
    assert len(list(workspace.path.iterdir())) == 1


def test_failed_write_leaves_the_old_state_and_no_rest(workspace, monkeypatch):
    workspace.write_configs_and_weights({"old": 1}, {})

    def no_space(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(WorkspaceError, match="No space left on device; give a folder with room"):
        workspace.write_configs_and_weights({"new": 1}, {})
    assert workspace.read_configs_and_weights_from_rank(0) == ({"old": 1}, {})
    assert len(list(workspace.path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "data bit", "header bit", "checksum", "grown", "empty"])
def test_torn_file_is_refused(workspace, damage):
    workspace.write_configs_and_weights({"amax": 17}, {"w": torch.arange(100)})
    path = file_of(workspace.path, 0)
    data = bytearray(path.read_bytes())
    if damage == "data bit":
        data[-1] ^= 1
    elif damage == "header bit":
        data[data.index(b"17")] ^= 1
    elif damage == "checksum":
        data[data.index(b'"sha256": "') + 11] ^= 1
    path.write_bytes({"cut": data[:-8], "grown": data + bytes(8), "empty": b""}.get(damage, data))
    with pytest.raises(WorkspaceError, match="damaged"):
        workspace.read_configs_and_weights_from_rank(0)


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "MASTER_PORT"])
def test_jobs_in_one_folder_do_not_meet(workspace, monkeypatch, variable):
    workspace.write_configs_and_weights({"job": 1}, {})
    monkeypatch.setenv(variable, "29501")
    other = NFSWorkspace(workspace.path)
    assert other.read_configs_and_weights_from_rank(0) == (None, None)
    other.write_configs_and_weights({"job": 2}, {})
    assert other.read_configs_and_weights_from_rank(0) == ({"job": 2}, {})
    monkeypatch.delenv(variable)
    assert workspace.read_configs_and_weights_from_rank(0) == ({"job": 1}, {})


def test_state_of_an_earlier_start_of_the_job_counts_as_nothing(workspace, monkeypatch):
    workspace.write_configs_and_weights({}, {})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert workspace.read_configs_and_weights_from_rank(0) == (None, None)


WRITER = """
import sys, time
from distribute import NFSWorkspace
NFSWorkspace(sys.argv[1]).write_configs_and_weights({}, {})
print("written", flush=True)
time.sleep(float(sys.argv[2]))
"""
STARTER = """
import os, subprocess, sys, time
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2], "0"], check=True)
time.sleep(600)
"""


def test_states_of_ended_jobs_are_removed_and_of_live_ones_stay(tmp_path, monkeypatch):
    """A rank that ended is no sign: as long as the process that started it lives, others may read its state."""
    started = {}
    for job, command in {
        "lives": [WRITER, str(tmp_path), "600"],
        "rank ended": [STARTER, WRITER, str(tmp_path)],
    }.items():
        environment = os.environ | {"TORCHELASTIC_RUN_ID": job, "PYTHONPATH": str(ROOT)}
        started[job] = subprocess.Popen(
            [sys.executable, "-c", *command], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert started[job].stdout.readline() == "written\n"
    assert len(list(tmp_path.iterdir())) == 2
    NFSWorkspace(tmp_path, leftover_limit_s=0)
    assert len(list(tmp_path.iterdir())) == 2
    for process in started.values():
        process.kill()
        process.communicate()
    NFSWorkspace(tmp_path)
    (left,) = tmp_path.iterdir()
    assert f"-{os.getpid()}-" in state_file.read_metadata(left)["owners"], "this process started it, and lives"


def test_states_of_other_hosts_are_removed_by_age(workspace, monkeypatch):
    monkeypatch.setattr(segments, "_boot_id", lambda: "0" * 32)
    workspace.write_configs_and_weights({}, {})
    unfinished = workspace.path / new_name()
    unfinished.touch()
    damaged = workspace.path / "rank_1_state-0.safetensors"
    damaged.touch()
    monkeypatch.undo()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    NFSWorkspace(workspace.path)
    assert len(list(workspace.path.iterdir())) == 3
    for path in workspace.path.iterdir():
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    unfinished.touch()
    NFSWorkspace(workspace.path)
    assert list(workspace.path.iterdir()) == [unfinished]
    NFSWorkspace(workspace.path, leftover_limit_s=0)
    assert list(workspace.path.iterdir()) == []


def test_a_link_is_not_followed(workspace, tmp_path):
    workspace.write_configs_and_weights({}, {})
    path = file_of(workspace.path, 0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WorkspaceError):
        workspace.read_configs_and_weights_from_rank(0)


def test_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WorkspaceError, match="Not a directory"):
        NFSWorkspace(tmp_path / "file").read_configs_and_weights_from_rank(0)


def test_unfinished_writes_of_dead_processes_are_removed(tmp_path):
    parts = new_name().split("-")
    (tmp_path / "-".join([*parts[:4], "1", *parts[5:]])).touch()
    mine = tmp_path / new_name()
    mine.touch()
    NFSWorkspace(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]


def hide_young_files(delay_s):
    """Make this process see files as an NFS client does whose attribute cache is `delay_s` seconds old."""
    real = os.open

    def late_open(path, flags, *args, **kwargs):
        young = isinstance(path, Path) and path.exists() and time.time() - path.stat().st_ctime < delay_s
        if young and flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_DIRECTORY:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, flags, *args, **kwargs)

    os.open = late_open


def exchanges(folder):
    """Both ranks write and read each other through a cache, then what must fail."""
    dist.init_process_group("gloo")
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    path = Path(folder, "run")
    if rank == 0:  # left by an earlier run; rank 1 has not made its workspace yet
        early = NFSWorkspace(path)
        early.write_configs_and_weights({}, {})
        stale = str(file_of(path, 0)).replace("rank_0", "rank_1")
        state_file.write_state(Path(stale), {}, {"config": '{"old": true}', "run": "old"})
    found = {}
    dist.barrier()
    if rank == 0:
        found["another run"] = early.read_configs_and_weights_from_rank(1)
    dist.barrier()
    workspace = NFSWorkspace(path, visible_limit_s=20)
    dist.barrier()
    found["nothing yet"] = workspace.read_configs_and_weights_from_rank(other)
    dist.barrier()
    hide_young_files(1.0)
    for number in range(2):
        workspace.write_configs_and_weights({"rank": rank, "number": number}, {"w": torch.full((3,), rank)})
        dist.barrier()
        config, weights = workspace.read_configs_and_weights_from_rank(other)
        found[f"write {number}"] = [config, weights["w"].tolist()]
        dist.barrier()
    workspace.visible_limit_s = 0.2
    if rank == 1:
        file_of(path, 1).unlink()
    dist.barrier()
    if rank == 0:
        found["vanished"] = refusal(lambda: workspace.read_configs_and_weights_from_rank(1))
        found["no such rank"] = refusal(lambda: workspace.read_configs_and_weights_from_rank(2))
    dist.barrier()
    dist.destroy_process_group()
    return found


def refusal(read):
    try:
        return f"read {read()}"
    except WorkspaceError as error:
        return str(error)


def test_ranks_exchange_through_a_late_file_system(tmp_path):
    first, second = run_ranks(exchanges, 2, str(tmp_path))
    for other, found in ((1, first), (0, second)):
        assert found["nothing yet"] == [None, None]
        for number in range(2):
            assert found[f"write {number}"] == [{"rank": other, "number": number}, [other] * 3]
    assert first["another run"] == [None, None]
    assert "the state of rank 1 did not show up in 0.2 s" in first["vanished"]
    assert "rank_1_state-" in first["vanished"]
    assert first["no such rank"] == "there is no rank 2; allowed are ranks 0 to 1"
