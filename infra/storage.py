"""Where a finished checkpoint goes: the `Target` protocol, `open_target(address)` and `publish(...)`.

A target is a local folder (a path or `file://`), `s3://bucket/prefix` or `hf://org/name[@revision]`.
`publish` drives every target in the same order: ask what is missing, put it, make the set visible, ask the
target for size and checksum of every file, seal with the receipt. Whether a file is there is always asked of
the target, never remembered. No secret is part of an address, a receipt or an error.
"""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from distribute.errors import TargetError
from infra.folder import FolderTarget
from infra.hub import HubTarget
from infra.redact import carries_secret, scrub
from infra.release import LocalFile, check_files, make_receipt
from infra.s3 import S3Target

__all__ = ["LocalFile", "Progress", "Target", "open_target", "publish"]

#: Called with a file's name and the number of its bytes just done; a skipped file is done at once.
Progress = Callable[[str, int], None]


class Target(Protocol):
    """One place a checkpoint can be published to. The methods are called in this order."""

    @property
    def address(self) -> str:
        """The address in canonical form, without secrets."""

    def preflight(self) -> str:
        """One line on what was found. Raises TargetError when the target cannot be written."""

    def kept(self) -> frozenset[str]:
        """Names that are the owner's there and are not replaced (a model card written by hand)."""

    def plan(self, files: Sequence[LocalFile]) -> list[LocalFile]:
        """Those of `files`, in the same order, that the target lacks or holds with other content."""

    def put(self, files: Sequence[LocalFile], *, on_progress: Progress) -> None:
        """Send `files` in the given order."""

    def commit(self, files: Sequence[LocalFile]) -> str | None:
        """Make exactly the set `files` the checkpoint. Returns the revision where the target has one."""

    def verify(self, files: Sequence[LocalFile]) -> dict[str, dict[str, Any]]:
        """What the target reports about each file. Raises StageError when size or checksum differ."""

    def seal(self, receipt: dict[str, Any]) -> None:
        """Leave the receipt (where the target keeps one) and drop what an older export left."""

    def discard(self) -> None:
        """After a failure or cancel: drop what only this attempt holds. Sent files stay for a resume."""


def publish(target: Target, files: Sequence[LocalFile], *, on_progress: Callable[[str, int], None]) -> dict[str, Any]:
    """Publish exactly `files`, less what the owner keeps. What the target already holds is not sent again.

    Returns the receipt, JSON-able: `address`, `revision`, `files` (name, size, sha256, remote),
    `uploaded_bytes`, `skipped` (names), `seconds`.
    Raises TargetError (a name or the target cannot be used), StageError (the target holds something else).
    """
    start = time.monotonic()
    try:
        ordered = check_files(files)
        kept = target.kept()
        ordered = [file for file in ordered if file.name not in kept]
        missing = target.plan(ordered)
        sent = {file.name for file in missing}
        for file in ordered:
            if file.name not in sent:
                on_progress(file.name, file.size)
        target.put(missing, on_progress=on_progress)
        revision = target.commit(ordered)
        receipt = make_receipt(
            target.address,
            revision=revision,
            files=ordered,
            remote=target.verify(ordered),
            missing=missing,
            seconds=time.monotonic() - start,
        )
        target.seal(receipt)
    except BaseException:
        target.discard()
        raise
    return receipt


def open_target(
    address: str, *, overwrite: bool = False, private: bool = True, endpoint_url: str | None = None
) -> Target:
    """The target behind `address`; nothing is contacted yet.

    `overwrite` allows a place that holds something other than an earlier export; `private` is used when a
    Hub repository has to be created; `endpoint_url` is for S3 and defaults to the usual AWS configuration.
    Raises TargetError for an address that cannot be meant.
    """
    scheme, separator, rest = address.partition("://")
    if not separator:
        if re.match(r"(?i)(s3|hf|file):", address):
            raise TargetError(
                f"the target {scrub(address)} lacks '//'; the form is s3://bucket/prefix or hf://org/name"
            )
        return _open_folder(address, overwrite=overwrite)
    _refuse_secrets(address)
    match scheme.lower():
        case "file":
            return _open_folder(unquote(rest.removeprefix("localhost")), overwrite=overwrite)
        case "s3":
            return _open_s3(rest, overwrite=overwrite, endpoint_url=endpoint_url)
        case "hf":
            return _open_hub(rest, private=private)
    raise TargetError(
        f"target scheme {scheme!r} is unknown; use a folder, s3://bucket/prefix or hf://org/name[@revision]"
    )


def _refuse_secrets(address: str) -> None:
    """An address is logged and kept in the receipt, so it may not carry a password, token or query."""
    if carries_secret(address):
        raise TargetError(
            f"the {urlsplit(address).scheme}:// address contains credentials or a query; "
            "give the bare address and pass secrets by environment or a Prefect block"
        )


def _open_folder(path: str, *, overwrite: bool) -> FolderTarget:
    if not path or "\0" in path:
        raise TargetError("the target folder is empty; give a path such as ./out or file:///data/out")
    folder = Path(path).expanduser().absolute()
    if folder.parent == folder:
        raise TargetError(f"the target {path} is the root of a file system; name a folder in it")
    return FolderTarget(folder, overwrite=overwrite)


def _open_s3(rest: str, *, overwrite: bool, endpoint_url: str | None) -> S3Target:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}", bucket):
        raise TargetError(f"s3://{rest} names no valid bucket; the form is s3://bucket/prefix")
    if not prefix:
        raise TargetError(f"s3://{bucket} has no prefix; add one, as in s3://{bucket}/my-model")
    if any(part in ("", ".", "..") for part in prefix.split("/")) or not prefix.isprintable():
        raise TargetError(f"s3://{bucket}/{prefix!r} has an empty, '.' or '..' part; the form is s3://bucket/prefix")
    if endpoint_url:
        _check_endpoint(endpoint_url)
    return S3Target(bucket, prefix, overwrite=overwrite, endpoint_url=endpoint_url)


def _check_endpoint(url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise TargetError("endpoint_url contains credentials; pass them by environment or a Prefect block")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TargetError(f"endpoint_url {url!r} is no URL; the form is https://host:port")


def _open_hub(rest: str, *, private: bool) -> HubTarget:
    repo, at, revision = rest.partition("@")
    name = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
    if not re.fullmatch(rf"{name}/{name}", repo) or "--" in repo or ".." in repo:
        raise TargetError(f"hf://{rest} is not a model repository; the form is hf://org/name[@revision]")
    if at and not re.fullmatch(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]*", revision):
        raise TargetError(f"hf://{rest} has no valid revision after '@'; the form is hf://org/name[@revision]")
    return HubTarget(repo, revision=revision or "main", private=private)
