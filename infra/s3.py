"""An S3 prefix as target: resume by checksum, visible files last, the receipt very last.

Every decision is made on a fresh HEAD or listing. Objects carry the file's sha256 as metadata, so resume and
verification do not depend on how an endpoint computes ETags. S3 has no rename: before the first object of a
complete older export is replaced, its receipt, index and config are taken away, so that a reader finds no
checkpoint rather than a mixed one.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import SecretStr

from distribute.errors import StageError, TargetError
from infra.release import RECEIPT, LocalFile, is_owned, is_visible, stale_names
from infra.s3_client import DIGEST, S3Prefix, plan_part_size


class S3Target:
    """Publishes under `s3://bucket/prefix`. See `infra.storage.Target`.

    Credentials come from the usual AWS chain (environment, config files, instance role) unless `key` and
    `secret` (and `token`) are given; `endpoint_url` likewise.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        overwrite: bool = False,
        endpoint_url: str | None = None,
        key: SecretStr | None = None,
        secret: SecretStr | None = None,
        token: SecretStr | None = None,
    ):
        self.overwrite = overwrite
        self._objects = S3Prefix(bucket, prefix, endpoint_url=endpoint_url, key=key, secret=secret, token=token)
        self._etags: dict[str, str] = {}
        self._present: set[str] = set()
        self._hide: list[str] = []
        self._earlier: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"S3Target({self.address!r})"

    @property
    def address(self) -> str:
        return f"s3://{self._objects.bucket}/{self._objects.prefix}"

    def preflight(self) -> str:
        try:
            return self._look()
        except StageError as error:
            raise TargetError(str(error)) from None

    def kept(self) -> frozenset[str]:
        return frozenset()  # a card there is that of the older export

    def plan(self, files: Sequence[LocalFile]) -> list[LocalFile]:
        for file in files:
            plan_part_size(file.size)
        self._present = self._objects.names()
        self._earlier = self._read_receipt(self._present)
        missing = {file.name for file in files if not self._holds(file)}
        self._hide = self._plan_hiding(missing, {file.name for file in files})
        return [file for file in files if file.name in missing or file.name in self._hide]

    def put(self, files: Sequence[LocalFile], *, on_progress: Callable[[str, int], None]) -> None:
        self._objects.abort_abandoned({file.name for file in files})
        hidden = False
        for file in files:
            if file.name in self._present and not hidden:
                for name in self._hide:
                    self._objects.call("delete_object", name)
                hidden = True
            self._etags[file.name] = self._objects.put_file(file, on_progress=on_progress)

    def commit(self, files: Sequence[LocalFile]) -> str | None:
        """Nothing to do: the order of `put` made the set visible, and a prefix has no revision."""
        return None

    def verify(self, files: Sequence[LocalFile]) -> dict[str, dict[str, Any]]:
        return {file.name: self._verify_object(file) for file in files}

    def seal(self, receipt: dict[str, Any]) -> None:
        new = {entry["name"] for entry in receipt["files"]}
        stale = stale_names(self._objects.names(), new, self._earlier)
        self._objects.put_bytes(RECEIPT, json.dumps(receipt, indent=2).encode() + b"\n")
        for name in stale:
            self._objects.call("delete_object", name)

    def discard(self) -> None:
        """Nothing to do: an unfinished object was aborted where it failed, finished ones serve a resume."""

    # ---- parts

    def _look(self) -> str:
        """Read what is there and write a probe: only a real attempt tells what the credentials may do."""
        self._objects.call("head_bucket")
        names = self._objects.names()
        earlier = self._read_receipt(names)
        if not earlier and not self.overwrite:
            self._refuse_foreign(names)
        probe = f".nogather-probe-{secrets.token_hex(8)}"
        self._objects.put_bytes(probe, b"")
        self._objects.call("delete_object", probe)
        found = "holds an earlier export, which will be replaced" if earlier else f"{len(names)} objects"
        return f"{self.address}: writable, {found}"

    def _read_receipt(self, names: Collection[str]) -> dict[str, Any] | None:
        if RECEIPT not in names:
            return None
        try:
            receipt = json.loads(self._objects.read(RECEIPT) or b"")
        except ValueError:
            return None
        return receipt if isinstance(receipt, dict) else None

    def _refuse_foreign(self, names: Collection[str]) -> None:
        """Somebody else's checkpoint under the prefix would be overwritten for good: ask first."""
        for name in sorted(names):
            if is_owned(name) or is_visible(name):
                head = self._objects.head(name)
                if head is not None and DIGEST not in head.get("Metadata", {}):
                    raise TargetError(
                        f"{self.address} already holds {name}, which is not from an export; "
                        "choose another prefix or allow overwriting"
                    )

    def _plan_hiding(self, missing: Collection[str], new: Collection[str]) -> list[str]:
        """What must not be seen while objects are replaced.

        Of a complete older export that is all a reader could start from; of an unfinished upload, only what
        will change, so that a resume sends no more than it must.
        """
        if not self._present & set(missing):
            return []
        visible = [name for name in sorted(self._present) if is_visible(name)]
        if self._earlier is None:
            visible = [name for name in visible if name in missing or name not in new]
        return [name for name in (RECEIPT, *visible) if name in self._present]

    def _holds(self, file: LocalFile) -> bool:
        head = self._objects.head(file.name)
        return (
            head is not None
            and head["ContentLength"] == file.size
            and head.get("Metadata", {}).get(DIGEST) == file.sha256
        )

    def _verify_object(self, file: LocalFile) -> dict[str, Any]:
        head = self._objects.head(file.name)
        if head is None:
            raise StageError(f"{self.address}: {file.name} is not there after the upload")
        etag, digest = head.get("ETag", "").strip('"'), head.get("Metadata", {}).get(DIGEST)
        expected = self._etags.get(file.name)
        wrong_etag = expected is not None and _comparable(head, etag, expected) and etag != expected
        if head["ContentLength"] != file.size or digest not in (None, file.sha256) or wrong_etag:
            raise StageError(
                f"{self.address}: {file.name} has {head['ContentLength']} bytes and ETag {etag}, expected "
                f"{file.size} bytes and {expected or file.sha256}; another writer or a damaged upload"
            )
        remote = {"size": head["ContentLength"], "sha256": digest, "etag": etag}
        return remote | ({"version_id": head["VersionId"]} if head.get("VersionId") else {})


def _comparable(head: dict[str, Any], etag: str, expected: str) -> bool:
    """Whether the ETag is an MD5 of the content; with KMS or customer keys, and on some servers, it is not."""
    if head.get("SSECustomerAlgorithm") or str(head.get("ServerSideEncryption", "")).startswith("aws:kms"):
        return False
    shape = r"[0-9a-f]{32}" + (re.escape(expected[32:]) if "-" in expected else "")
    return re.fullmatch(shape, etag) is not None
