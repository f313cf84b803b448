"""Nothing here imports torch: whatever happens to an export, the folder holds the old checkpoint or the new one."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distribute.errors import TargetError
from distribute.live import carry, folder, moving
from distribute.live.folder import Staging, await_visible
from distribute.segments import new_name
from distribute.source import INDEX_NAME
from tests.distribute.live.exports import NEW, OLD, USER, export, fill, in_child, read, stage

ROOT = Path(__file__).parents[3]


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


# ---- what is in the folder afterwards


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("links", [True, False])
def test_the_new_checkpoint_replaces_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool, links: bool
) -> None:
    monkeypatch.setattr(folder, "_is_mount", lambda path: inside)
    if not links:
        monkeypatch.setattr(carry.os, "link", _refuse)
    out = tmp_path / "out"
    fill(out, OLD | USER)
    (out / "mine" / "notes.txt").chmod(0o640)
    (out / "link").symlink_to("README.md")
    (out / "mine" / "empty").mkdir(mode=0o700)
    out.chmod(0o750)
    export(out, NEW)
    assert read(out) == NEW | USER | {"link": USER["README.md"]}
    assert os.readlink(out / "link") == "README.md"
    modes = [stat.S_IMODE((out / name).stat().st_mode) for name in (".", "mine/notes.txt", "mine/empty")]
    assert modes == [0o750, 0o640, 0o700]
    assert names(tmp_path) == ["out"]


def test_a_file_that_a_program_has_open_stays_the_same_file(tmp_path: Path) -> None:
    fill(tmp_path / "out", OLD | {"log": b"a"})
    with (tmp_path / "out" / "log").open("ab", buffering=0) as log:
        staging = stage(tmp_path / "out", NEW)
        (tmp_path / "out" / "late").write_bytes(b"late")
        staging.commit(NEW)
        log.write(b"b")
    assert read(tmp_path / "out") == NEW | {"log": b"ab", "late": b"late"}


def test_shards_with_names_of_their_own_go_when_the_old_index_names_them(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "../keep", "c": "notes.txt", "d": 1}}).encode()
    mine = {"adapter.safetensors": b"mine", "notes.txt": b"mine", "model.fp16.safetensors": b"mine"}
    fill(tmp_path / "out", {INDEX_NAME: index, "part-1.safetensors": b"old"} | mine)
    export(tmp_path / "out", {"model.safetensors": b"new"})
    assert read(tmp_path / "out") == {"model.safetensors": b"new"} | mine


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": 3}', b"\xff", b"null"])
def test_an_old_index_that_cannot_be_read_is_replaced(tmp_path: Path, content: bytes) -> None:
    fill(tmp_path / "out", {INDEX_NAME: content, "README.md": b"mine"})
    export(tmp_path / "out", {"model.safetensors": b"new"})
    assert read(tmp_path / "out") == {"model.safetensors": b"new", "README.md": b"mine"}


@pytest.mark.parametrize("make", ["missing", "parents missing", "empty", "symlink", "dangling symlink", "relative"])
def test_the_folder_may_have_any_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str) -> None:
    monkeypatch.chdir(tmp_path)
    real = tmp_path / "real" / "deep" if make == "parents missing" else tmp_path / "real"
    given = {"relative": Path("real")}.get(make, real)
    if "symlink" in make:
        given = tmp_path / "link"
        given.symlink_to("real")
    if make in ("empty", "symlink"):
        real.mkdir()
    export(given, NEW)
    assert read(real) == NEW
    assert given.is_symlink() == ("symlink" in make)
    assert names(tmp_path) == (["link", "real"] if "symlink" in make else ["real"])


def test_a_new_folder_has_the_mode_that_mkdir_gives(tmp_path: Path) -> None:
    (tmp_path / "by_mkdir").mkdir()
    export(tmp_path / "out", NEW)
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "by_mkdir").stat().st_mode


def test_files_that_were_not_announced_are_not_published(tmp_path: Path) -> None:
    staging = stage(tmp_path / "out", NEW | {"scratch": b""})
    with pytest.raises(AssertionError, match="scratch"):
        staging.commit(NEW)
    staging.discard()
    assert names(tmp_path) == []


def test_discard_leaves_no_trace_and_after_commit_nothing_to_do(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    stage(out, NEW).discard()
    assert names(tmp_path) == []
    staging = stage(out, NEW)
    staging.commit(NEW)
    staging.discard()
    assert read(out) == NEW


# ---- what is refused


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for given, says in (("file", "is a file"), ("file/below", "is a file"), ("loop", "loop"), ("/", "root")):
        with pytest.raises(TargetError, match=says):
            Staging(tmp_path / given)
    with pytest.raises(TargetError, match="cannot write"):
        Staging(Path("/proc/nogather-test/out"))
    assert names(tmp_path) == ["file", "loop"]


def test_a_folder_with_the_name_of_a_file_is_not_destroyed(tmp_path: Path) -> None:
    fill(tmp_path / "out", {"config.json/mine": b"mine"})
    staging = stage(tmp_path / "out", NEW)
    with pytest.raises(TargetError, match="remove it"):
        staging.commit(NEW)
    staging.discard()
    assert read(tmp_path / "out") == {"config.json/mine": b"mine"}


@pytest.mark.parametrize("inside", [False, True])
def test_the_second_of_two_exports_at_once_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    monkeypatch.setattr(folder, "_is_mount", lambda path: inside)
    fill(tmp_path / "out", OLD)
    first = stage(tmp_path / "out", NEW)
    with pytest.raises(TargetError, match="another export"):
        Staging(tmp_path / "out")
    first.commit(NEW)
    assert read(tmp_path / "out") == NEW
    export(tmp_path / "out", OLD)
    assert read(tmp_path / "out") == OLD


# ---- leftovers


def test_only_what_nobody_owns_is_collected(tmp_path: Path) -> None:
    fill(tmp_path / "out", OLD)
    own = new_name()
    boot, _, pid, start = own.split("-")[1:5]
    dead = own.replace(f"-{pid}-{start}-", f"-{pid}-{int(start) + 1}-")
    foreign, forgotten = (own.replace(boot, digits * 8) for digits in "ab")
    for name in (own, dead, foreign, forgotten):
        fill(tmp_path / f".out.{name}", NEW)
    fill(tmp_path / f".other.{dead}", NEW)
    week = time.time() - folder.FOREIGN_LEFTOVER_S - 60
    os.utime(tmp_path / f".out.{forgotten}", (week, week))
    Staging(tmp_path / "out").discard()
    assert names(tmp_path) == sorted([f".other.{dead}", f".out.{foreign}", f".out.{own}", "out"])


@pytest.mark.parametrize("way", ["exchange", "rename", "inside"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, way: str) -> None:
    """In `inside` a reader may find no checkpoint until the next export has started; never a mixture."""
    code = f"from tests.distribute.live.exports import kill_everywhere; print(kill_everywhere({way!r}, {str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40, "steps that were tried"


def test_a_note_of_somebody_else_beside_the_folder_is_not_followed(tmp_path: Path) -> None:
    fill(tmp_path / "out", OLD)
    note = json.dumps({"files": ["config.json"], "stale": ["model-00001-of-00003.safetensors"]}).encode()
    fill(tmp_path / f".out.{new_name()}", {".moving": note, "config.json": b"theirs"})
    Staging(tmp_path / "out").discard()
    assert read(tmp_path / "out") == OLD


# ---- a disk that fails


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path / "out", OLD | {"big": bytes(100_000)})
    before = read(tmp_path / "out")

    def fails() -> None:
        import resource  # noqa: PLC0415  in the child only

        carry.os.link = _refuse  # so the user's file must be copied
        staging = stage(tmp_path / "out", NEW)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            staging.commit(NEW)
        finally:
            staging.discard()

    assert "StageError" in in_child(fails)
    assert read(tmp_path / "out") == before
    assert names(tmp_path) == ["out"]


def test_a_move_that_fails_is_finished_by_the_next_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_is_mount", lambda path: True)
    fill(tmp_path / "out", OLD | USER)
    staging = stage(tmp_path / "out", NEW)
    with monkeypatch.context() as patch:
        patch.setattr(moving.os, "replace", _refuse)
        with pytest.raises(TargetError, match="cannot write"):
            staging.commit(NEW)
        staging.discard()
    assert "config.json" not in read(tmp_path / "out")
    Staging(tmp_path / "out").discard()
    assert read(tmp_path / "out") == NEW | USER


def test_a_mount_point_and_a_full_tmpfs(tmp_path: Path) -> None:
    """Real mounts, in a mount namespace of their own."""
    code = f"from tests.distribute.live.exports import on_mounts; from pathlib import Path; on_mounts(Path({str(tmp_path)!r}))"
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(["unshare", "-rm", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("parent", [0o555, 0o1777])
def test_a_parent_of_somebody_else_is_worked_around(parent: int) -> None:
    """0555: nothing can be made beside the folder. 1777 (as /tmp): something can, but no folder of others be renamed."""
    if os.getuid() != 0:
        pytest.skip("needs two users")
    code = f"from tests.distribute.live.exports import in_parent_of_root; in_parent_of_root({parent})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- other ranks


def test_another_rank_waits_until_it_sees_the_folder(tmp_path: Path) -> None:
    staging = stage(tmp_path / "out", {})
    hidden = staging.path.rename(tmp_path / "not yet")
    timer = threading.Timer(0.2, hidden.rename, [staging.path])
    timer.start()
    await_visible(staging.path, staging.token, 30)
    timer.join()
    with pytest.raises(TargetError, match="did not show up"):
        await_visible(staging.path, "another", 0.05)
    staging.discard()
    with pytest.raises(TargetError, match="all ranks see"):
        await_visible(staging.path, staging.token, 0)


def _refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError(1, "refused")
