"""Exports without a model: files made up, folders filled, processes killed. Parts run in processes of their own."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from distribute import swap
from distribute.errors import WorkspaceError
from distribute.live import folder
from distribute.live.folder import Staging
from distribute.segments import new_name
from distribute.shards import preallocate
from distribute.source import INDEX_NAME

NOBODY = 65534
Files = Mapping[str, bytes]


def checkpoint(label: str, shards: int) -> dict[str, bytes]:
    """A checkpoint of `shards` files whose content says whose it is."""
    weights = [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    if shards == 1:
        weights = ["model.safetensors"]
    small = ["config.json", "generation_config.json", "SHA256SUMS"]
    files = {name: f"{label} {name}".encode() for name in (*weights, *small)}
    if shards > 1:
        files[INDEX_NAME] = json.dumps({"label": label, "weight_map": {name: name for name in weights}}).encode()
    return files


OLD = checkpoint("old", 3) | {"hf_quant_config.json": b"old"}
NEW = checkpoint("new", 2)
LATER = checkpoint("later", 1)
USER = {"README.md": b"mine", "mine/notes.txt": b"mine", ".hidden/x": b"mine", "tokenizer.json": b"mine"}


def fill(place: Path, files: Files) -> None:
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)


def read(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def stage(place: Path, files: Files) -> Staging:
    staging = Staging(place)
    fill(staging.path, files)
    return staging


def export(place: Path, files: Files) -> None:
    stage(place, files).commit(files)


def in_child(function: Callable[[], None]) -> str:
    """Run it in a forked process; returns the traceback, "" when it ended well, "killed" when it was."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            function()
        except BaseException:
            os.write(writer, traceback.format_exc()[-4000:].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode()
    return "killed" if os.waitpid(pid, 0)[1] == signal.SIGKILL else said


def kill_everywhere(way: str, root: str) -> int:
    """Kill exports before their first, second, ... call of the operating system; returns how many there were."""
    os.fsync = lambda fd: None  # slow, and a kill loses no page
    if way == "inside":
        folder._is_mount = lambda path: True
    if way == "rename":
        swap.exchange = lambda first, second: False
    for step in itertools.count():
        place = Path(root, str(step))
        out = place / "out"
        fill(out, OLD | USER)
        end = in_child(partial(_export_and_die, out, step))
        assert end in ("", "killed"), end
        _check(way, out, step)
        shutil.rmtree(place)
        if not end:
            return step
    raise AssertionError


def _export_and_die(out: Path, step: int) -> None:
    calls = itertools.count()

    def before(event: str, args: object) -> None:
        if event.startswith(("os.", "shutil.", "open", "ctypes.dlsym")) and next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(before)
    export(out, NEW)


def _check(way: str, out: Path, step: int) -> None:
    whole = (OLD | USER, NEW | USER)
    if way == "exchange":
        assert _visible(out) in whole, step
    if way == "rename":
        assert not out.exists() or _visible(out) in whole, step
    if way == "inside" and _loadable(out):
        assert _visible(out) in whole or _weights(out) in (_weights_of(OLD), _weights_of(NEW)), step
    if step % 2:
        Staging(out).discard()
        assert read(out) in whole, (step, sorted(read(out)))
    else:
        export(out, LATER)
        assert read(out) == LATER | USER, (step, sorted(read(out)))
    assert [path.name for path in out.parent.iterdir()] == ["out"], (step, list(out.parent.iterdir()))


def _visible(out: Path) -> dict[str, bytes]:
    return {name: content for name, content in read(out).items() if not name.startswith(".out.")}


def _loadable(out: Path) -> bool:
    return (out / "config.json").exists() and any((out / name).exists() for name in (INDEX_NAME, "model.safetensors"))


def _weights(out: Path) -> dict[str, bytes]:
    return _weights_of(_visible(out))


def _weights_of(files: Files) -> dict[str, bytes]:
    """What a loader opens: it may find them while a small file of the older export waits to be removed."""
    return {
        name: files[name] for name in files if name.endswith(".safetensors") or name in ("config.json", INDEX_NAME)
    }


def on_mounts(root: Path) -> None:
    """In a mount namespace: a bind mount is filled in place; a full file system leaves all as it was."""
    (root / "real").mkdir()
    (root / "mount point").mkdir()
    subprocess.run(["mount", "--bind", root / "real", root / "mount point"], check=True)
    fill(root / "mount point", OLD | USER)
    export(root / "mount point", NEW)
    assert read(root / "real") == NEW | USER
    assert sorted(path.name for path in root.iterdir()) == ["mount point", "real"]

    # A folder of a lower layer can be neither exchanged nor renamed.
    layers = root / "layers"
    layers.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", layers], check=True)
    fill(layers / "lower" / "out", OLD | USER)
    for name in ("upper", "work", "merged"):
        (layers / name).mkdir()
    where = f"lowerdir={layers}/lower,upperdir={layers}/upper,workdir={layers}/work,userxattr"
    if subprocess.run(["mount", "-t", "overlay", "-o", where, "none", layers / "merged"]).returncode == 0:
        out = layers / "merged" / "out"
        export(out, NEW)
        assert read(out) == NEW | USER
        assert [path.name for path in out.parent.iterdir()] == ["out"]

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", root / "real"], check=True)
    out = root / "real" / "out"
    fill(out, OLD | USER)
    staging = stage(out, NEW)
    try:
        preallocate(staging.path / "model.safetensors", 1 << 20, b"")
    except WorkspaceError as error:
        assert "no room" in str(error)
    else:
        raise AssertionError("there was room")
    staging.discard()
    assert read(out) == OLD | USER
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def in_parent_of_root(mode: int) -> None:
    """As root: a user exports into a folder of theirs whose parent is root's, of this mode."""
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name, "parent")
        out = parent / "out"
        fill(out, OLD | USER)
        for path in (out, *out.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        if mode & 0o1000:  # the folder is another user's, open to all
            os.chown(out, 1, 1)
            out.chmod(0o777)
        Path(name).chmod(0o755)
        parent.chmod(mode)
        new_name()  # afterwards Python's own files may not be readable
        said = in_child(partial(_export_as_nobody, out))
        assert not said, said
        assert read(out) == NEW | USER, sorted(read(out))
        assert [path.name for path in parent.iterdir()] == ["out"], list(parent.iterdir())


def _export_as_nobody(out: Path) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    export(out, NEW)
