"""One S3 prefix: small calls with explained errors, and uploads that never leave parts behind.

Owns how bytes and errors travel; what is sent and in which order is `infra.s3`'s. s3fs is used for its client
and its retries only: its listings are cached per process and its own multipart upload is not aborted on
Ctrl-C, so neither is used. Checksums newer than Content-MD5 are sent only where an operation requires one,
because several S3-compatible servers refuse them.
"""

import asyncio
import base64
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import s3fs
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)
from pydantic import SecretStr

from distribute.errors import StageError, TargetError
from infra.redact import scrub
from infra.release import LocalFile

_log = logging.getLogger(__name__)

MIB, GIB = 1 << 20, 1 << 30
MIN_PART_BYTES, MAX_PART_BYTES, MAX_PARTS = 5 * MIB, 5 * GIB, 10_000  # Amazon S3 "multipart upload limits"
PREFERRED_PART_BYTES = 32 * MIB
_IN_FLIGHT_BYTES = 128 * MIB

#: Metadata key under which every object carries the sha256 of its file.
DIGEST = "nogather-sha256"

#: What s3fs and botocore raise; ValueError is an endpoint that is no URL.
_CLIENT_ERRORS = (OSError, BotoCoreError, ClientError, ValueError)

_ABSENT = {"404", "NoSuchKey", "NotFound"}
_REASONS = {
    **dict.fromkeys(("401", "403", "AccessDenied", "AllAccessDisabled", "AccountProblem"),
                    "access is denied; check the credentials and their policy"),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
                    "the credentials are wrong or expired; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    **dict.fromkeys(("404", "NoSuchBucket"), "the bucket does not exist; create it first or correct its name"),
    **dict.fromkeys(("301", "PermanentRedirect", "AuthorizationHeaderMalformed"),
                    "the bucket lies in another region; set AWS_DEFAULT_REGION to it"),
}  # fmt: skip


def plan_part_size(size: int, *, preferred: int = PREFERRED_PART_BYTES, max_parts: int = MAX_PARTS) -> int:
    """Bytes of each part (the last may be shorter) for a file of `size` bytes.

    At least `preferred`, within S3's 5 MiB to 5 GiB, and such that there are at most `max_parts` parts.
    Raises TargetError when no part size can hold the file.
    """
    needed = -(-size // max_parts)
    part = min(max(preferred, MIN_PART_BYTES, -(-needed // MIB) * MIB), MAX_PART_BYTES)
    if part * max_parts < size:
        raise TargetError(f"a file of {size} bytes does not fit {max_parts} S3 parts; use smaller shards")
    return part


class S3Prefix:
    """Objects under `s3://bucket/prefix/`; names are relative to it. Raises TargetError and StageError."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str | None,
        key: SecretStr | None,
        secret: SecretStr | None,
        token: SecretStr | None,
    ):
        self.bucket, self.prefix = bucket, prefix
        credentials = {"key": key, "secret": secret, "token": token}
        plain = {name: value.get_secret_value() for name, value in credentials.items() if value}
        self._secrets = list(plain.values())
        self._fs = s3fs.S3FileSystem(
            endpoint_url=endpoint_url,
            use_listings_cache=False,
            skip_instance_cache=True,
            config_kwargs={
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "connect_timeout": 10,
            },
            **plain,
        )

    def call(self, method: str, name: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One S3 operation on the bucket, or on the object `name`; the client retries what may be retried."""
        try:
            return self._fs.call_s3(method, **self._located(name), **parameters)
        except _CLIENT_ERRORS as error:
            # `from None`: the original's text may hold what `scrub` took out.
            raise self._explain(error, f"{method} on {self._shown(name)}") from None

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def head(self, name: str) -> dict[str, Any] | None:
        """The object's size, ETag and metadata as they are now; None when there is none."""
        try:
            return self._fs.call_s3("head_object", **self._located(name))
        except _CLIENT_ERRORS as error:
            if _code(error) in _ABSENT:
                return None
            raise self._explain(error, f"head_object on {self.bucket}/{self.key(name)}") from None

    def names(self) -> set[str]:
        """Every object under the prefix, asked of the server now."""
        found: set[str] = set()
        page: dict[str, Any] = {}
        while True:
            page = self.call("list_objects_v2", Prefix=self.key(""), **_continued(page))
            found.update(entry["Key"][len(self.key("")) :] for entry in page.get("Contents", []))
            if not page.get("IsTruncated"):
                return found - {""}

    def read(self, name: str) -> bytes | None:
        """A small object's content, None when there is none."""
        if self.head(name) is None:
            return None
        try:
            return self._fs.cat_file(f"{self.bucket}/{self.key(name)}")
        except _CLIENT_ERRORS as error:
            raise self._explain(error, f"get_object on {self.bucket}/{self.key(name)}") from None

    def put_bytes(self, name: str, content: bytes, *, sha256: str | None = None) -> str:
        """Returns the ETag the object must have."""
        digest = hashlib.md5(content, usedforsecurity=False)
        self.call(
            "put_object",
            name,
            Body=content,
            ContentMD5=base64.b64encode(digest.digest()).decode(),
            Metadata={DIGEST: sha256} if sha256 else {},
        )
        return digest.hexdigest()

    def put_file(self, file: LocalFile, *, on_progress: Callable[[str, int], None]) -> str:
        """Send one file, in parts when it is large. Returns the ETag the object must have.

        Raises StageError when the file is no longer what its sha256 says; nothing becomes visible then.
        """
        part_size = plan_part_size(file.size)
        if file.size > part_size:
            return self._put_parts(file, part_size, on_progress)
        content = file.path.read_bytes()
        _check_digest(file, hashlib.sha256(content).hexdigest())
        etag = self.put_bytes(file.name, content, sha256=file.sha256)
        on_progress(file.name, file.size)
        return etag

    def abort_abandoned(self, names: Collection[str]) -> None:
        """Abort unfinished uploads of exactly these objects: a killed run left them, and they are billed."""
        try:
            answer = self.call("list_multipart_uploads", Prefix=self.key(""))
        except (TargetError, StageError) as error:
            _log.warning("unfinished uploads cannot be listed: %s", error)
            return
        keys = {self.key(name): name for name in names}
        for upload in answer.get("Uploads") or []:
            if upload["Key"] in keys:
                _log.info("aborting an unfinished upload of %s", upload["Key"])
                self.call("abort_multipart_upload", keys[upload["Key"]], UploadId=upload["UploadId"])

    # ---- parts

    def _put_parts(self, file: LocalFile, part_size: int, on_progress: Callable[[str, int], None]) -> str:
        upload = self.call("create_multipart_upload", file.name, Metadata={DIGEST: file.sha256})["UploadId"]
        flying: deque[tuple[Future[dict[str, Any]], int]] = deque()
        try:
            etags, digests = self._send_parts(file, part_size, upload, flying, on_progress)
            parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(etags, 1)]
            self.call("complete_multipart_upload", file.name, UploadId=upload, MultipartUpload={"Parts": parts})
        except BaseException:
            # Also on Ctrl-C and cancel: parts that stay are billed and no listing shows them.
            for future, _ in flying:
                future.cancel()
            self._abort(file.name, upload)
            raise
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        return f"{whole}-{len(digests)}"

    def _send_parts(
        self,
        file: LocalFile,
        part_size: int,
        upload: str,
        flying: deque[tuple[Future[dict[str, Any]], int]],
        on_progress: Callable[[str, int], None],
    ) -> tuple[list[str], list[bytes]]:
        """The parts' ETags and their MD5 digests. At most about `_IN_FLIGHT_BYTES` are held at a time."""
        etags: list[str] = []
        digests: list[bytes] = []
        whole = hashlib.sha256()

        def land() -> None:
            future, size = flying[0]
            try:
                etags.append(future.result()["ETag"])
            except _CLIENT_ERRORS as error:
                raise self._explain(error, f"upload_part on {self.bucket}/{self.key(file.name)}") from None
            flying.popleft()
            on_progress(file.name, size)

        with file.path.open("rb") as source:
            while content := source.read(part_size):
                whole.update(content)
                digests.append(hashlib.md5(content, usedforsecurity=False).digest())
                call = self._fs._call_s3(  # the coroutine behind call_s3, by fsspec's convention
                    "upload_part",
                    **self._located(file.name),
                    UploadId=upload,
                    PartNumber=len(digests),
                    Body=content,
                    ContentMD5=base64.b64encode(digests[-1]).decode(),
                )
                flying.append((asyncio.run_coroutine_threadsafe(call, self._fs.loop), len(content)))
                if len(flying) >= max(1, _IN_FLIGHT_BYTES // part_size):
                    land()
        while flying:
            land()
        _check_digest(file, whole.hexdigest())
        return etags, digests

    def _abort(self, name: str, upload: str) -> None:
        try:
            self.call("abort_multipart_upload", name, UploadId=upload)
        except (TargetError, StageError) as error:
            _log.warning("an unfinished upload of %s stays: %s", self.key(name), error)

    def _shown(self, name: str | None) -> str:
        return self.bucket if name is None else f"{self.bucket}/{self.key(name)}"

    def _located(self, name: str | None) -> dict[str, str]:
        return {"Bucket": self.bucket} if name is None else {"Bucket": self.bucket, "Key": self.key(name)}

    def _explain(self, error: Exception, doing: str) -> TargetError | StageError:
        if isinstance(error, (NoCredentialsError, PartialCredentialsError, ProfileNotFound)):
            return TargetError(
                f"there are no complete S3 credentials for {self.bucket}; "
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE"
            )
        code = _code(error)
        if code in _REASONS:
            return TargetError(f"S3 refused {doing} ({code}): {_REASONS[code]}")
        text = scrub(f"{type(error).__name__}: {error}", self._secrets)
        return StageError(f"S3 failed at {doing} ({code or 'no answer'}): {text}")


def _code(error: BaseException) -> str:
    """S3's own error code; s3fs keeps the client's error as the cause of the Python one."""
    for candidate in (error, error.__cause__):
        if isinstance(candidate, ClientError):
            return str(candidate.response.get("Error", {}).get("Code", ""))
    return ""


def _continued(page: dict[str, Any]) -> dict[str, str]:
    token = page.get("NextContinuationToken")
    return {"ContinuationToken": token} if token else {}


def _check_digest(file: LocalFile, digest: str) -> None:
    if digest != file.sha256:
        raise StageError(f"{file.path} changed since it was written (sha256 differs); run the export again")
