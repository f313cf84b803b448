"""Segments: private, reserved before they are written, recognised when their owner is gone."""

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from distribute import delivery, get_tensors_parallel, segments
from distribute.errors import WorkspaceError
from distribute.ranks import Ranks
from distribute.segments import SHARED_MEMORY, collect_dead, map_segment, new_name, write_segment
from tests.torchrun import descendants, left_segments, run_ranks, wait_until

MEGABYTE = 2**20
OWNER = "import sys; from distribute.segments import new_name; print(new_name(), flush=True); sys.stdin.read()"


def fill(fd):
    os.pwrite(fd, b"abc", 0)


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

    def fail(fd):
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


def test_files_of_other_hosts_are_collected_when_they_are_old(tmp_path):
    foreign, notes = (
        tmp_path / re.sub("nogather-[0-9a-f]+", "nogather-00000000", new_name()),
        tmp_path / "nogather-notes",
    )
    for path in (foreign, notes):
        path.touch()
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    assert collect_dead(tmp_path, 9 * 86400) == 0
    assert collect_dead(tmp_path) == 1
    assert list(tmp_path.iterdir()) == [notes]


def test_missing_folder_has_nothing_to_collect(tmp_path):
    assert collect_dead(tmp_path / "missing") == 0


def gathers_large():
    with Ranks.start() as ranks:
        with get_tensors_parallel(torch.full((4 * MEGABYTE,), float(ranks.rank)), [0, 1]) as tensors:
            found = [[float(tensor.min()), float(tensor.max())] for tensor in tensors]
        return {"found": found, "left": os.listdir("/dev/shm")}


def test_small_dev_shm_is_no_bus_error():
    small = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh")
    if os.system("unshare -rm true 2>/dev/null"):
        pytest.skip("no user namespaces on this machine")
    first, second = run_ranks(gathers_large, 2, prefix=small)
    assert first == {"found": [[0.0, 0.0], [1.0, 1.0]], "left": []}
    assert second == {"found": [], "left": []}


def holds_a_segment():
    """Rank 1 stops with a segment that has a name, as if the reader were slow."""
    with Ranks.start() as ranks:
        if ranks.rank == 0:
            delivery.map_segment = lambda *args: time.sleep(600)
        with get_tensors_parallel(torch.ones(1000), [0, 1]):
            pass


def starts_afterwards():
    with Ranks.start() as ranks, get_tensors_parallel(torch.ones(10), [0, 1]) as tensors:
        return [ranks.rank, len(tensors)]


def test_what_kill_9_left_is_gone_after_the_next_run():
    killed = []

    def segments_of_killed():
        return [name for name in left_segments() if any(f"-{pid}-" in name for pid in killed)]

    def kill(process):
        wait_until(
            lambda: killed.extend(set(descendants(process.pid)) - set(killed)) or segments_of_killed(),
            what="the segment",
        )
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: a rank cleans up when it sees its peer die
            for pid in killed:
                os.kill(pid, sign)

    assert run_ranks(holds_a_segment, 2, check=False, during=kill) == [{"error": "lost"}] * 2
    assert len(segments_of_killed()) == 1
    assert run_ranks(starts_afterwards, 2) == [[0, 2], [1, 0]]
    assert segments_of_killed() == []
