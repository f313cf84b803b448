"""Exports of several ranks to folders that are full, read-only, late, seen by one rank alone, or wanted by two jobs."""

import ctypes
import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distribute.errors import TargetError
from distribute.live import folder as export_folder
from distribute.live import save
from tests.distribute.live import saved
from tests.distribute.scenarios import die, run_scenarios
from tests.torchrun import run_ranks, wait_until

OLD, NEW = 1, 2  # seeds
CLONE_NEWNS, PAGE = 0x20000, os.sysconf("SC_PAGESIZE")
#: small: room for the old checkpoint and a page of each file of the new one.
MOUNTS = """
cd {0} && mount -t tmpfs -o size={1} tmpfs small && cp -r old small/out &&
mount -t tmpfs tmpfs ro && cp -r old ro/out && cp -r old ro/mounted &&
mount -t tmpfs tmpfs ro/mounted && cp -r old/. ro/mounted && mount -o remount,ro ro && cd / && exec "$@"
"""


def export(out: Path) -> Any:
    """The error of an export, or None, and what the folder and the one above it hold then."""
    error = None
    try:
        saved.save(out, NEW, "mixed", dist.get_world_size())
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    dist.barrier()
    return [error, saved.digests(out), saved.names(out.parent)]


# ---- on small and read-only file systems, in a mount namespace


def full(rank: int, folder: Path) -> Any:
    return export(folder / "small" / "out")


def full_later(rank: int, folder: Path) -> Any:
    """A file system that cannot reserve space says that it is full when the rows are written."""
    os.posix_fallocate = refuse(errno.EOPNOTSUPP)
    return export(folder / "small" / "out")


def read_only(rank: int, folder: Path) -> Any:
    return export(folder / "ro" / "out")


def only_parent_read_only(rank: int, folder: Path) -> Any:
    return export(folder / "ro" / "mounted")


def other_view(rank: int, folder: Path) -> Any:
    """The path is another folder on rank 1, as without a shared file system."""
    os.environ["NOGATHER_WAIT_LIMIT_S"] = "4"
    if rank == 1:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder / "view"], check=True)
        shutil.copytree(folder / "old", folder / "view" / "out")
    return export(folder / "view" / "out")


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    place = tmp_path_factory.mktemp("expected")
    return {seed: saved.make_checkpoint(place / str(seed), seed) for seed in (OLD, NEW)}


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("mounted")
    saved.make_checkpoint(folder / "old", OLD)
    shutil.copytree(folder / "old", folder / "view" / "out")
    for name in ("small", "ro"):
        (folder / name).mkdir()
    pages = sum(-(-path.stat().st_size // PAGE) for path in (folder / "old").iterdir())
    weights = len(list((folder / "old").glob("*.safetensors")))
    mounts = MOUNTS.format(folder, (pages + weights + 2) * PAGE)  # and the token
    prefix = ("unshare", "-rm", "sh", "-c", mounts, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces on this machine, so no small file systems")
    names = ["full", "full_later", "read_only", "only_parent_read_only", "other_view"]
    results = run_scenarios(__name__, names, 2, folder, prefix)
    return {name: [result.get("value", result) for result in results[name]] for name in names}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("full", "no room for model-"),
        ("full_later", "write failed on rank "),
        ("read_only", "export_dir {0}/ro/out is not writable; choose another folder"),
        ("other_view", "{0}/view/.out.nogather-"),
    ],
)
def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(
    mounted: dict[str, list[Any]], digests: dict[int, dict[str, str]], name: str, says: str
) -> None:
    first, second = mounted[name]
    assert first[0] == second[0]
    assert all(part in first[0] for part in says.split("{0}"))
    for _, content, names in (first, second):
        assert content == digests[OLD]
        assert [name for name in names if name[0] == "."] == []


def test_a_view_of_its_own_is_named(mounted: dict[str, list[Any]]) -> None:
    assert mounted["other_view"][1][0].endswith(
        "that rank 0 made did not show up here in 2 s; export to a folder that all ranks see"
    )


def test_a_full_disk_in_the_middle_is_named(mounted: dict[str, list[Any]]) -> None:
    assert "No space left on device" in mounted["full_later"][0][0]


def test_a_writable_folder_in_a_read_only_one_is_written(
    mounted: dict[str, list[Any]], digests: dict[int, dict[str, str]]
) -> None:
    assert [result[:2] for result in mounted["only_parent_read_only"]] == [[None, digests[NEW]]] * 2


# ---- on a usual file system


def no_large_files_first(rank: int, folder: Path) -> Any:
    return with_quota(folder / "out", limited=rank == 0)


def no_large_files_other(rank: int, folder: Path) -> Any:
    return with_quota(folder / "out", limited=rank == 1)


def with_quota(out: Path, *, limited: bool) -> Any:
    if limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    return export(out)


def late(rank: int, folder: Path) -> Any:
    """As on NFS: rank 1 sees the staging folder, and what is in it, two seconds late."""
    first_asked: list[float] = []

    def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if ".nogather-" in str(path):
                first_asked.append(time.monotonic())
                if time.monotonic() - first_asked[0] < 2:
                    raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            return function(path, *args, **kwargs)

        return asked

    if rank == 1:
        os.open, Path.read_text = delayed(os.open), delayed(Path.read_text)
    result = export(folder / "late")
    assert rank == 0 or len(first_asked) > 3
    return result


def slow(rank: int, folder: Path) -> Any:
    """A rank writes for longer than the limit of the caller's process group."""
    if rank == 1:
        write_values = save.write_values
        save.write_values = lambda *args: (time.sleep(6), write_values(*args))
    return export(folder / "slow")


def killed_while_moving(rank: int, folder: Path) -> Any:
    """Rank 0 ends between two files of a folder that must be filled in place."""
    export_folder._is_mount = lambda path: True
    replace, calls = os.replace, []

    def dying(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            die("kill")
        replace(*args)

    if rank == 0:
        os.replace = dying
    saved.save(folder / "moving", NEW, "mixed", 2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], Path]:
    folder = tmp_path_factory.mktemp("plain")
    for name in ("out", "late", "slow", "moving"):
        saved.make_checkpoint(folder / name, OLD)
    names = ["no_large_files_first", "no_large_files_other", "late", "slow", "killed_while_moving"]
    return run_scenarios(__name__, names, 2, folder), folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_large_files_first", "no room for model-"),
        ("no_large_files_other", "write failed on rank 1: OSError: [Errno 27] File too large"),
    ],
)
def test_a_quota_of_one_rank_is_an_error_on_all(
    plain: tuple[dict[str, list[Any]], Path], digests: dict[int, dict[str, str]], name: str, says: str
) -> None:
    for result in plain[0][name]:
        error, content, _ = result["value"]
        assert says in error
        assert content == digests[OLD]
    assert [name for name in saved.names(plain[1]) if name.startswith(".out")] == []


@pytest.mark.parametrize("name", ["late", "slow"])
def test_what_comes_late_is_waited_for(
    plain: tuple[dict[str, list[Any]], Path], digests: dict[int, dict[str, str]], name: str
) -> None:
    assert [result["value"][:2] for result in plain[0][name]] == [[None, digests[NEW]]] * 2
    assert plain[0][name][0]["seconds"] > {"late": 2, "slow": 6}[name]


def test_a_move_that_was_cut_short_is_no_checkpoint_until_the_next_export(
    plain: tuple[dict[str, list[Any]], Path], digests: dict[int, dict[str, str]]
) -> None:
    results, folder = plain
    assert results["killed_while_moving"][0] is None
    assert "failed on rank 0: ended before 'commit'" in results["killed_while_moving"][1]["error"]
    assert not {"config.json", "model.safetensors.index.json"} & set(saved.names(folder / "moving"))
    saved.save(folder / "moving", NEW)
    assert saved.digests(folder / "moving") == digests[NEW]
    assert [path.name for path in folder.rglob(".*")] == []


# ---- two jobs


def shares_a_folder(root: str, job: int) -> list[str | None]:
    """Job 2 asks for the folder while job 1 writes; then both ask again and again."""
    dist.init_process_group("gloo")
    out, writing, refused = Path(root, "shared", "out"), Path(root, "writing"), Path(root, "refused")
    said: list[str | None] = []

    def save_once(place: Path) -> None:
        try:
            saved.save(place, job, "mixed", 2)
            said.append(None)
        except TargetError as error:
            said.append(str(error))
        dist.barrier()

    write_values = save.write_values
    if job == 1:
        save.write_values = lambda *args: (writing.touch(), wait_until(refused.exists), write_values(*args))
    else:
        wait_until(writing.exists)
        save_once(out)
        refused.touch()
    for _ in range(6):
        save_once(out)
        save.write_values = write_values
    save_once(Path(root, "shared", f"own {job}"))
    dist.destroy_process_group()
    return said


def test_of_two_jobs_at_once_one_is_refused_and_each_result_is_whole(
    tmp_path: Path, digests: dict[int, dict[str, str]]
) -> None:
    saved.make_checkpoint(tmp_path / "shared" / "out", OLD)
    with ThreadPoolExecutor() as pool:
        jobs = list(pool.map(lambda job: run_ranks(shares_a_folder, 2, str(tmp_path), job), [1, 2]))
    for first, second in jobs:
        assert first == second
        assert first[-1] is None
    refusal = f"another export to {tmp_path / 'shared' / 'out'} is running; wait for it or stop it"
    assert jobs[0][0][0] is None
    assert jobs[1][0][0] == refusal
    assert {said for job in jobs for said in job[0]} == {None, refusal}
    assert saved.digests(tmp_path / "shared" / "out") in (digests[1], digests[2])
    assert saved.names(tmp_path / "shared") == ["out", "own 1", "own 2"]
    for job in (1, 2):
        expected = {name: digest for name, digest in digests[job].items() if name != saved.README}
        assert saved.digests(tmp_path / "shared" / f"own {job}") == expected


def refuse(code: int) -> Callable[..., Any]:
    def refused(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    return refused
