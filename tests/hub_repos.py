"""Repositories and blobs of the Hub stand-in: what lies on disk, without any HTTP.

Every revision is kept, so tests can look at what a reader could have seen in between.
"""

import base64
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One file of a revision. `lfs` is the sha256 of the blob when the file lies in the LFS store."""

    size: int
    blob: str
    lfs: str | None = None


@dataclass
class Repo:
    private: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)

    def resolve(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None

    def commit(self, branch: str, files: dict[str, Entry]) -> str:
        oid = hashlib.sha1(f"{branch}{len(self.history)}{sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        self.history.append(oid)
        self.branches[branch] = oid
        return oid


class Blobs:
    """The LFS store and git's own blobs: files in one folder, named by sha256 or by git's sha1."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True)

    def has(self, oid: str, size: int | None = None) -> bool:
        path = self.folder / oid
        return path.exists() and size in (None, path.stat().st_size)

    def add(self, content: bytes) -> str:
        oid = hashlib.sha256(content).hexdigest()
        (self.folder / oid).write_bytes(content)
        return oid

    def add_plain(self, content: bytes) -> Entry:
        (self.folder / git_blob(content)).write_bytes(content)
        return Entry(len(content), git_blob(content))

    def entry(self, name: str, content: bytes) -> Entry:
        if is_lfs(name):
            oid = self.add(content)
            return Entry(len(content), git_blob(oid.encode()), oid)
        return self.add_plain(content)

    def read(self, entry: Entry) -> bytes:
        return (self.folder / (entry.lfs or entry.blob)).read_bytes()


def apply(operations: list[dict[str, Any]], files: dict[str, Entry], blobs: Blobs) -> dict[str, Entry]:
    """The files after the operations of a commit. Raises KeyError for a file or blob that is not there."""
    files = dict(files)
    for operation in operations:
        value = operation["value"]
        if operation["key"] == "file":
            files[value["path"]] = blobs.add_plain(base64.b64decode(value["content"]))
        elif operation["key"] == "lfsFile":
            if not blobs.has(value["oid"], value["size"]):
                raise KeyError(value["oid"])
            files[value["path"]] = Entry(value["size"], git_blob(value["oid"].encode()), value["oid"])
        else:
            del files[value["path"]]
    return files


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def described(name: str, entry: Entry) -> dict[str, Any]:
    lfs = {"lfs": {"oid": entry.lfs, "size": entry.size, "pointerSize": 134}} if entry.lfs else {}
    return {"type": "file", "oid": entry.blob, "size": entry.size, "path": name, **lfs}
