import os
import subprocess
import sys
from pathlib import Path

import pytest

from distribute import swap
from distribute.swap import exchange, lock_of, put_in_place, recover, release_lock, take_lock


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_two_folders_change_names_in_one_step(tmp_path: Path) -> None:
    first, second = folder(tmp_path / "é 1", "1"), folder(tmp_path / "2", "2")
    assert exchange(first, second)
    assert (first / "file").read_text() + (second / "file").read_text() == "21"
    assert not exchange(first, tmp_path / "missing")


@pytest.mark.parametrize("offered", [True, False])
def test_the_new_folder_gets_the_name_and_the_old_one_is_handed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    if not offered:
        monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    assert put_in_place(folder(tmp_path / "1", "1"), tmp_path / "out") is None
    old = put_in_place(folder(tmp_path / "2", "2"), tmp_path / "out")
    assert old is not None and (old / "file").read_text() == "1"
    assert (tmp_path / "out" / "file").read_text() == "2"
    recover(tmp_path / "out")  # as the next run does after a kill here
    assert (tmp_path / "out" / "file").read_text() == "2"
    assert old.exists() == offered


def test_a_failed_second_rename_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    folder(tmp_path / "out", "old")
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "missing", tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_folder_that_a_kill_left_aside_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "exchange", lambda first, second: False)
    folder(tmp_path / "out", "old")
    new = folder(tmp_path / "new", "new")
    rename = Path.rename

    def killed(self: Path, target: Path) -> None:
        if self == new:
            raise KeyboardInterrupt  # not an OSError: nothing is put back
        rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            put_in_place(new, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    recover(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"


def test_one_process_at_a_time_has_the_lock_and_a_kill_gives_it_back(tmp_path: Path) -> None:
    path = lock_of(tmp_path / "out")
    lock = take_lock(path)
    assert lock is not None and take_lock(path) is None
    release_lock(path, lock)
    code = f"""
import os, signal
from pathlib import Path
from distribute.swap import take_lock
print(take_lock(Path({str(path)!r})) is not None, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    lock = take_lock(path)
    assert lock is not None
    release_lock(path, lock)
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = lock_of(tmp_path / "out")
    lock = take_lock(path)
    assert lock is not None
    copy = os.dup(lock)  # what a child of fork has
    release_lock(path, lock)
    again = take_lock(path)
    assert again is not None
    release_lock(path, again)
    os.close(copy)
