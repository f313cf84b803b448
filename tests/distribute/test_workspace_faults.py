"""Full, read-only, late and shared folders: a gather works another way, or fails on all ranks and leaves nothing."""

import os
import resource
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distribute import NFSWorkspace, get_configs_parallel, get_tensors_parallel, peer_memory
from distribute.control import Control
from tests.distribute.scenarios import run_scenarios
from tests.torchrun import run_ranks

MEBIBYTE = 2**20
BOTH = [0, 1]
MOUNTS = (
    "mount -t tmpfs -o size=8m tmpfs /dev/shm && mount -t tmpfs -o size=2m tmpfs {0}/full && "
    'mount -t tmpfs -o ro tmpfs {0}/ro && exec "$@"'
)


def large(rank):
    return torch.full((16 * MEBIBYTE,), rank, dtype=torch.uint8)


def gather_large(rank, workspace=None):
    """What arrives, and what a folder holds then."""
    with get_configs_parallel({"large": large(rank)}, BOTH, None, workspace, limit_s=20) as configs:
        return [int(config["large"].unique()) for config in configs]


def forbid_reading_memory():
    """As a container does that forbids process_vm_readv: values then need a place of their own."""
    peer_memory.LEAST_BYTES = 1 << 60


def shm_too_small(rank, folder):
    forbid_reading_memory()
    with get_tensors_parallel(large(rank), BOTH) as tensors:
        return [int(tensor.unique()) for tensor in tensors]


def no_room_for_segments(rank, folder):
    forbid_reading_memory()
    tempfile.tempdir = str(folder / "full")
    return gather_large(rank)


def disk_full(rank, folder):
    workspace = NFSWorkspace(folder / "full" / "state")
    workspace.write_configs_and_weights({"old": rank}, {"w": torch.ones(10)})
    for write in (
        lambda: gather_large(rank, folder / "full" / "gather"),
        lambda: workspace.write_configs_and_weights({"new": rank}, {"w": large(rank)}),
    ):
        with pytest.raises(ValueError, match=r"workspace .*No space left on device; give a folder with room"):
            write()
    assert os.listdir(folder / "full" / "gather") == []
    assert workspace.read_configs_and_weights_from_rank(rank)[0] == {"old": rank}
    Control.of(BOTH).exchange("both have failed")
    return len([name for name in os.listdir(folder / "full" / "state") if not name.startswith("rank_")])


def read_only(rank, folder):
    for write in (lambda: gather_large(rank, folder / "ro"), lambda: NFSWorkspace(folder / "ro" / "state")):
        with pytest.raises(ValueError, match="Read-only file system"):
            write()
    return os.listdir(folder / "ro")


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mounted")
    mounts = MOUNTS.format(folder)
    for name in ("full", "ro"):
        (folder / name).mkdir()
    prefix = ("unshare", "-rm", "sh", "-c", mounts, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces on this machine, so no small file systems")
    results = run_scenarios(
        __name__, ["shm_too_small", "no_room_for_segments", "disk_full", "read_only"], 2, folder, prefix
    )
    return results, folder


def values(results):
    assert [result.get("error") for result in results] == [None, None]
    return [result["value"] for result in results]


def test_small_shared_memory_is_replaced_with_one_warning(mounted):
    results, folder = mounted
    assert values(results["shm_too_small"]) == [BOTH, []]
    assert (folder / "shm_too_small.1.log").read_text().count("--shm-size") == 1


def test_without_room_for_segments_data_goes_over_the_network(mounted):
    results, folder = mounted
    assert values(results["no_room_for_segments"]) == [BOTH, []]
    writer = (folder / "no_room_for_segments.1.log").read_text()
    assert "16.0 MiB are needed in /dev/shm" in writer
    assert writer.count("--shm-size") == 1


def test_full_disk_keeps_the_old_state_and_no_rest(mounted):
    assert values(mounted[0]["disk_full"]) == [0, 0]


def test_read_only_folder_is_an_error_on_all_ranks(mounted):
    assert values(mounted[0]["read_only"]) == [[], []]


def file_size_limit(rank, folder):
    """As a quota or a full disk in the middle of a file, on one rank alone."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, MEBIBYTE))
    with pytest.raises(ValueError, match="File too large; give a folder with room"):
        gather_large(rank, folder / "limited")
    assert os.listdir(folder / "limited") == []
    return gather_large(rank)


def late_folder(rank, folder):
    """The first rank sees the folder and what is in it two seconds late, as with NFS."""
    seen, real = {}, os.open

    def late_open(path, flags, *args, **kwargs):
        if (
            Path(path).is_relative_to(folder / "late")
            and time.monotonic() - seen.setdefault("first", time.monotonic()) < 2
        ):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, flags, *args, **kwargs)

    if rank == 0:
        os.open = late_open
    started = time.monotonic()
    with get_configs_parallel({"rank": rank, "w": torch.ones(2)}, BOTH, None, folder / "late" / "deep") as configs:
        ranks = [config["rank"] for config in configs]
    assert time.monotonic() - started > 2
    return ranks


def never_visible(rank, folder):
    """A folder that is another one on the first rank: an error that names file and rank, in time."""
    place = folder / f"own {rank}"
    with get_configs_parallel({"w": torch.ones(2)}, BOTH, None, place, limit_s=2):
        pass


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    names = ["file_size_limit", "late_folder", "never_visible"]
    return run_scenarios(__name__, names, 2, tmp_path_factory.mktemp("folders"))


def test_file_that_may_not_grow_is_an_error_on_all_ranks_and_leaves_no_rest(results):
    assert values(results["file_size_limit"]) == [BOTH, []]


def test_late_folder_is_waited_for(results):
    assert values(results["late_folder"]) == [BOTH, []]


def test_folder_that_never_shows_the_file_is_named(results):
    first, second = results["never_visible"]
    assert first["error"] == second["error"]
    assert "the config of rank 1 did not show up in 1 s at " in first["error"]
    assert "own 0/nogather-" in first["error"]


def shares_a_folder(folder, job):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    workspace = NFSWorkspace(folder)
    Path(folder, f"started {job} {rank}").touch()
    deadline = time.monotonic() + 20
    while (
        len([name for name in os.listdir(folder) if name.startswith("started")]) < 4 and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    found = set()
    for number in range(10):
        workspace.write_configs_and_weights({"job": job, "number": number}, {})
        with get_configs_parallel({"job": job, "w": torch.ones(2)}, BOTH, None, folder) as configs:
            found |= {config["job"] for config in configs}
        config, _ = workspace.read_configs_and_weights_from_rank(1 - rank)
        found.add(config["job"])
        assert config["number"] == number
        dist.barrier()
        NFSWorkspace(folder, leftover_limit_s=0).write_configs_and_weights({"job": job, "number": number}, {})
        dist.barrier()
    return sorted(found)


def test_two_jobs_at_once_in_one_folder_do_not_meet(tmp_path):
    with ThreadPoolExecutor() as pool:
        jobs = list(pool.map(lambda job: run_ranks(shares_a_folder, 2, str(tmp_path), job), ["a", "b"]))
    assert jobs == [[["a"], ["a"]], [["b"], ["b"]]]
    assert len(list(tmp_path.glob("rank_?_state-*.safetensors"))) == 4
    assert list(tmp_path.glob("nogather-*")) == []
