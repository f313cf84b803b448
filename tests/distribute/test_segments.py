"""Segments: private, reserved before they are written, recognised when their owner is gone."""

import errno
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distribute import segments
from distribute.errors import WorkspaceError
from distribute.segments import SHARED_MEMORY, collect_dead, map_segment, new_name, write_segment

OWNER = "import sys; from distribute.segments import new_name; print(new_name(), flush=True); sys.stdin.read()"


def fill(buffer):
    buffer[:3] = b"abc"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    segments._warn_once.cache_clear()
    return tmp_path


@pytest.fixture
def full_memory(tmp_path_factory, monkeypatch):
    """A stand-in for /dev/shm whose space other ranks took after the quick check: reserving fails."""
    folder = tmp_path_factory.mktemp("shm")
    reserve = os.posix_fallocate

    def fallocate(fd, offset, length):
        if Path(os.readlink(f"/proc/self/fd/{fd}")).parent == folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(segments, "SHARED_MEMORY", folder)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    return folder


def test_segment_is_private_and_outlives_its_name():
    path = write_segment(8192, fill)
    try:
        assert path.parent == SHARED_MEMORY
        assert path.stat().st_mode & 0o777 == 0o600
        buffer = map_segment(path, 8192)
    finally:
        path.unlink()
    assert buffer[:4] == b"abc\0"


def test_segment_of_another_size_is_refused():
    path = write_segment(10, fill)
    try:
        with pytest.raises(OSError, match="holds 10 bytes instead of 11"):
            map_segment(path, 11)
    finally:
        path.unlink()


def test_failing_writer_leaves_no_segment():
    before = os.listdir(SHARED_MEMORY)

    def fail(buffer):
        raise RuntimeError("half written")

    with pytest.raises(RuntimeError, match="half written"):
        write_segment(10, fail)
    assert os.listdir(SHARED_MEMORY) == before


def test_names_differ_and_cannot_be_guessed():
    names = {new_name() for _ in range(100)}
    assert len({name[-16:] for name in names}) == 100


def test_full_memory_falls_back_to_a_file_with_one_warning(full_memory, temporary, caplog):
    for _ in range(2):
        path = write_segment(4096, fill)
        assert path.parent == temporary
        assert map_segment(path, 4096)[:3] == b"abc"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--shm-size" in caplog.text
    assert os.listdir(full_memory) == []


def test_no_room_anywhere_says_what_is_needed(full_memory, temporary):
    needed = 2**60
    with pytest.raises(WorkspaceError) as caught:
        write_segment(needed, fill)
    text = str(caught.value)
    assert f"{needed / 2**20:.1f} MiB are needed" in text
    assert re.search(r"has \d+\.\d MiB free", text)
    assert "--shm-size" in text
    assert os.listdir(temporary) == []


def test_only_files_of_dead_owners_are_collected(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    theirs = tmp_path / owner.stdout.readline().strip()
    mine = tmp_path / new_name()
    boot, space = theirs.name.split("-")[1:3]
    unknown = [
        tmp_path / "nogather-notes",
        tmp_path / theirs.name.replace(boot, "00000000"),  # another boot, or another host's file on NFS
        tmp_path / theirs.name.replace(space, "1"),  # a container with process ids of its own
    ]
    reused = tmp_path / f"nogather-{boot}-{space}-{os.getpid()}-1-0-0"  # the pid lives again, but started later
    for path in (theirs, mine, reused, *unknown):
        path.touch()
    assert collect_dead(tmp_path) == 1
    assert not reused.exists()
    assert theirs.exists()
    owner.kill()  # not waited for: a zombie owns nothing either
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    assert collect_dead(tmp_path) == 1
    owner.communicate()
    assert not theirs.exists()
    assert all(path.exists() for path in (mine, *unknown))


def test_missing_folder_has_nothing_to_collect(tmp_path):
    assert collect_dead(tmp_path / "missing") == 0
