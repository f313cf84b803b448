"""What is published: the files of one finished checkpoint, their order, and the receipt.

Pure: no network and no target is known here. A reader of a checkpoint starts from `config.json` or from the
index, so these come last; everything they point at comes first. `receipt.json` comes after them and is the
only sign of a complete upload. What an older export left behind is known by its own receipt and by the few
names that only an export writes; nothing else in a target is ever removed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from distribute.errors import TargetError

RECEIPT = "receipt.json"

#: Names that only an export writes; files of these names that the new export lacks are stale.
OWNED = ("model-*.safetensors", "model.safetensors", "*.index.json", "hf_quant_config.json")


@dataclass(frozen=True)
class LocalFile:
    """One file to publish. `name` is its posix path relative to the target, `sha256` is lower-case hex."""

    name: str
    path: Path
    size: int
    sha256: str


def is_safe_name(name: str) -> bool:
    """Whether `name` is a plain relative posix path: no root, no `..`, no backslash, no control character."""
    parts = name.split("/")
    plain = name.isprintable() and "\\" not in name and ":" not in parts[0]
    return bool(name) and plain and not any(part in ("", ".", "..") for part in parts)


def check_files(files: Iterable[LocalFile]) -> list[LocalFile]:
    """The same files in upload order. Raises TargetError for a name, size or path that cannot be published."""
    checked: dict[str, LocalFile] = {}
    for file in files:
        if not is_safe_name(file.name):
            raise TargetError(f"file name {file.name!r} cannot be published: use a relative path without '..'")
        if file.name == RECEIPT:
            raise TargetError(f"a file named {RECEIPT} cannot be published: the name is kept for the receipt")
        if file.name in checked:
            raise TargetError(f"{file.name} is given twice")
        if not file.path.is_file() or file.path.stat().st_size != file.size:
            raise TargetError(f"{file.path} is missing or no longer {file.size} bytes; run the export again")
        checked[file.name] = file
    if not checked:
        raise TargetError("there are no files to publish")
    return upload_order(list(checked.values()))


def is_weight(name: str) -> bool:
    return name.endswith(".safetensors")


def upload_order(files: Sequence[LocalFile]) -> list[LocalFile]:
    """Weights, then the rest, then what makes the checkpoint visible: the index, and `config.json` last.

    A single `model.safetensors` has no index: it is what a reader looks for, so it stands with the index.
    """

    def key(file: LocalFile) -> tuple[int, str]:
        if file.name == "config.json":
            return 4, file.name
        if file.name.endswith(".index.json"):
            return 3, file.name
        if file.name == "model.safetensors":
            return 2, file.name
        return (0 if is_weight(file.name) else 1), file.name

    return sorted(files, key=key)


def is_owned(name: str) -> bool:
    """Whether only an export writes a file of this name (at the top of the target)."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in OWNED)


def is_visible(name: str) -> bool:
    """Whether readers find the checkpoint by this file."""
    return "/" not in name and (name == "config.json" or name.endswith(".index.json"))


def stale_names(present: Iterable[str], new: Collection[str], earlier: Mapping[str, Any] | None) -> list[str]:
    """Names in `present` but not `new` that an older export left: in its receipt `earlier`, or owned by pattern."""
    old = set(receipt_names(earlier))
    return sorted(name for name in present if name not in new and name != RECEIPT and (name in old or is_owned(name)))


def receipt_names(receipt: Mapping[str, Any] | None) -> list[str]:
    """File names in an earlier receipt; unsafe or malformed entries are left out, for it may be anyone's."""
    entries = receipt.get("files") if isinstance(receipt, Mapping) else None
    names = [entry.get("name") for entry in entries or [] if isinstance(entry, Mapping)]
    return [name for name in names if isinstance(name, str) and is_safe_name(name) and name != RECEIPT]


def make_receipt(
    address: str,
    *,
    revision: str | None,
    files: Sequence[LocalFile],
    remote: Mapping[str, Mapping[str, Any]],
    missing: Sequence[LocalFile],
    seconds: float,
) -> dict[str, Any]:
    """The JSON record of one upload. `remote[name]` is what the target reported about the file."""
    sent = {file.name for file in missing}
    return {
        "address": address,
        "revision": revision,
        "files": [
            {"name": f.name, "size": f.size, "sha256": f.sha256, "remote": dict(remote[f.name])}
            for f in sorted(files, key=lambda f: PurePosixPath(f.name).parts)
        ],
        "uploaded_bytes": sum(file.size for file in missing),
        "skipped": sorted(file.name for file in files if file.name not in sent),
        "seconds": round(seconds, 3),
    }
