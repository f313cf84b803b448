"""The S3 target against a real server (SeaweedFS). A plain boto client gives the second opinion."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr

from distribute.errors import StageError, TargetError
from infra import s3_client
from infra.release import RECEIPT, LocalFile
from infra.s3 import S3Target
from infra.s3_client import DIGEST, GIB, MAX_PARTS, MIB, plan_part_size
from infra.storage import open_target, publish
from tests.infra.conftest import MakeFiles, Progress, contents_of, write_files
from tests.seaweed import KEY, SECRET, SeaweedFS

TIB = 1 << 40


class Remote:
    """What another client sees under `prefix`."""

    def __init__(self, seaweed: SeaweedFS, bucket: str, prefix: str = "models/tiny"):
        self.client, self.bucket, self.prefix = seaweed.client, bucket, prefix
        self.address = f"s3://{bucket}/{prefix}"

    def names(self) -> set[str]:
        page = self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        return {entry["Key"][len(self.prefix) + 1 :] for entry in page.get("Contents", [])}

    def read(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}")["Body"].read()

    def write(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{name}", Body=content)

    def contents(self) -> dict[str, bytes]:
        return {name: self.read(name) for name in self.names()}

    def open_uploads(self) -> list[str]:
        answer = self.client.list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"] for upload in answer.get("Uploads") or []]


@pytest.fixture
def remote(seaweed: SeaweedFS, bucket: str) -> Remote:
    return Remote(seaweed, bucket)


class Calls:
    """Records every S3 operation the target makes, in order."""

    def __init__(self, target: S3Target, monkeypatch: pytest.MonkeyPatch):
        self.log: list[tuple[str, str]] = []
        original = target._objects._fs._call_s3

        async def recorded(method: str, *args: Any, **kwargs: Any) -> Any:
            self.log.append((method, kwargs.get("Key", "").rpartition("/")[2]))
            return await original(method, *args, **kwargs)

        monkeypatch.setattr(target._objects._fs, "_call_s3", recorded)
        monkeypatch.setattr(
            target._objects._fs, "call_s3", lambda *args, **kwargs: _run(target, recorded(*args, **kwargs))
        )

    def of(self, method: str) -> list[str]:
        return [name for called, name in self.log if called == method]


def _run(target: S3Target, coroutine: Any) -> Any:
    return s3_client.asyncio.run_coroutine_threadsafe(coroutine, target._objects._fs.loop).result()


def publish_to(address: str, files: list[LocalFile]) -> dict[str, Any]:
    return publish(open_target(address), files, on_progress=Progress())


# ---- parts


@given(st.integers(1, 48 * TIB), st.integers(1, 8 * GIB), st.sampled_from([1000, MAX_PARTS]))
@example(5 * TIB, 32 * MIB, MAX_PARTS)
@example(1, 1, MAX_PARTS)
def test_every_file_fits_the_parts_or_is_refused(size: int, preferred: int, max_parts: int) -> None:
    if size > max_parts * 5 * GIB:
        with pytest.raises(TargetError, match="smaller shards"):
            plan_part_size(size, preferred=preferred, max_parts=max_parts)
        return
    part = plan_part_size(size, preferred=preferred, max_parts=max_parts)
    assert 5 * MIB <= part <= 5 * GIB
    assert -(-size // part) <= max_parts


# ---- the real server


def test_a_checkpoint_arrives_whole_with_the_receipt_last(
    remote: Remote, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, progress = make_files(extra={"sub/code.py": b"x = 1"}), Progress()
    target = open_target(remote.address)
    assert isinstance(target, S3Target)
    calls = Calls(target, monkeypatch)
    assert target.preflight() == f"{remote.address}: writable, 0 objects"
    receipt = publish(target, files, on_progress=progress)
    found = remote.contents()
    assert json.loads(found.pop(RECEIPT)) == receipt
    assert found == contents_of(files)
    assert calls.of("put_object")[-3:] == ["model.safetensors.index.json", "config.json", RECEIPT]
    assert progress.done == {file.name: file.size for file in files}
    for entry in receipt["files"]:
        content = found[entry["name"]]
        assert entry["remote"]["etag"] == hashlib.md5(content).hexdigest()
        assert entry["remote"]["sha256"] == entry["sha256"] == hashlib.sha256(content).hexdigest()


def test_a_large_file_goes_in_parts_and_its_etag_is_checked(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "plan_part_size", lambda size: 5 * MIB)
    content = hashlib.shake_256(b"large").digest(12 * MIB + 7)
    files, progress = (
        write_files(tmp_path / "c", {"model.safetensors": content, "config.json": b"{}"}),
        Progress(),
    )
    receipt = publish(open_target(remote.address), files, on_progress=progress)
    assert remote.read("model.safetensors") == content
    parts = [content[i : i + 5 * MIB] for i in range(0, len(content), 5 * MIB)]
    digest = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest()
    etags = {entry["name"]: entry["remote"]["etag"] for entry in receipt["files"]}
    assert etags["model.safetensors"] == f"{digest}-3"
    assert progress.done["model.safetensors"] == len(content)
    assert publish_to(remote.address, files)["uploaded_bytes"] == 0


def test_a_second_run_sends_nothing(remote: Remote, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files()
    publish_to(remote.address, files)
    target = open_target(remote.address)
    assert isinstance(target, S3Target)
    calls = Calls(target, monkeypatch)
    assert "earlier export" in target.preflight()
    receipt = publish(target, files, on_progress=Progress())
    assert [name for name in calls.of("put_object") if not name.startswith(".nogather-probe")] == [RECEIPT]
    assert receipt["skipped"] == sorted(file.name for file in files)
    assert receipt["uploaded_bytes"] == 0


def test_a_resume_sends_exactly_the_absent_and_the_damaged(
    remote: Remote, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_files(shards=6)
    publish_to(remote.address, files)
    absent, short, other = (f"model-0000{n}-of-00006.safetensors" for n in (2, 4, 5))
    for name in (RECEIPT, absent):
        remote.client.delete_object(Bucket=remote.bucket, Key=f"{remote.prefix}/{name}")
    remote.write(short, remote.read(short)[:-100])
    remote.write(other, bytes(len(remote.read(other))))
    target = open_target(remote.address)
    assert isinstance(target, S3Target)
    calls = Calls(target, monkeypatch)
    receipt = publish(target, files, on_progress=Progress())
    assert calls.of("put_object") == [absent, short, other, RECEIPT]
    assert receipt["uploaded_bytes"] == sum(f.size for f in files if f.name in (absent, short, other))
    found = remote.contents()
    found.pop(RECEIPT)
    assert found == contents_of(files)


def test_an_older_export_goes_and_the_owners_objects_stay(
    remote: Remote, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_to(remote.address, make_files(shards=5, extra={"chat_template.jinja": b"old"}))
    remote.write("README.md", b"by the owner")
    files = make_files(shards=2, seed=1)
    target = open_target(remote.address)
    assert isinstance(target, S3Target)
    calls = Calls(target, monkeypatch)
    publish(target, files, on_progress=Progress())
    found = remote.contents()
    found.pop(RECEIPT)
    assert found == contents_of(files) | {"README.md": b"by the owner"}
    # Old shards go only after the new set is complete.
    last_put = max(i for i, (method, _) in enumerate(calls.log) if method == "put_object")
    stale = [i for i, (method, name) in enumerate(calls.log) if method == "delete_object" and "-of-00005" in name]
    assert len(stale) == 5
    assert min(stale) > last_put


def test_shards_of_the_same_name_are_never_read_through_the_older_index(
    remote: Remote, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_to(remote.address, make_files(shards=3))
    target = open_target(remote.address)
    assert isinstance(target, S3Target)
    seen: list[set[str]] = []
    put_file = target._objects.put_file

    def watched(file: LocalFile, **options: Any) -> str:
        seen.append(remote.names())
        return put_file(file, **options)

    monkeypatch.setattr(target._objects, "put_file", watched)
    publish(target, make_files(shards=3, seed=1), on_progress=Progress())
    for names in seen[:-1]:
        assert not names & {"config.json", RECEIPT}
    assert {"config.json", RECEIPT} <= remote.names()


def test_another_clients_write_is_seen_at_once(remote: Remote, make_files: MakeFiles) -> None:
    files = make_files()
    target = open_target(remote.address)
    publish(target, files, on_progress=Progress())
    assert target.plan(files) == []
    remote.write("config.json", b"{" + b" " * 999 + b"}")
    assert [file.name for file in target.plan(files)] == ["model.safetensors.index.json", "config.json"]
    with pytest.raises(StageError, match=r"config\.json has 1001 bytes"):
        target.verify(files)


def test_other_bytes_under_the_right_size_and_metadata_are_found(remote: Remote, make_files: MakeFiles) -> None:
    files, target = make_files(), open_target(remote.address)
    publish(target, files, on_progress=Progress())
    damaged = files[2]
    remote.client.put_object(
        Bucket=remote.bucket,
        Key=f"{remote.prefix}/{damaged.name}",
        Body=bytes(damaged.size),
        Metadata={DIGEST: damaged.sha256},
    )
    with pytest.raises(StageError, match=f"{damaged.name} has {damaged.size} bytes and ETag"):
        target.verify(files)


def test_a_foreign_checkpoint_is_refused_unless_overwrite(remote: Remote, make_files: MakeFiles) -> None:
    remote.write("model-00001-of-00001.safetensors", b"somebody's")
    with pytest.raises(TargetError, match="not from an export"):
        open_target(remote.address).preflight()
    target = open_target(remote.address, overwrite=True)
    target.preflight()
    publish(target, make_files(), on_progress=Progress())
    assert "model-00001-of-00001.safetensors" not in remote.names()


def test_a_file_changed_since_the_export_is_not_published(
    remote: Remote, make_files: MakeFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "plan_part_size", lambda size: 5 * MIB)
    large = write_files(tmp_path / "l", {"model-extra.safetensors": bytes(6 * MIB)})
    files = make_files() + large
    for changed in (files[2], large[0]):
        original = changed.path.read_bytes()
        changed.path.write_bytes(b"x" * changed.size)
        with pytest.raises(StageError, match="changed since"):
            publish_to(remote.address, files)
        changed.path.write_bytes(original)
    assert remote.open_uploads() == []
    assert not remote.names() & {"config.json", RECEIPT, "model-extra.safetensors"}


# ---- ends of an upload


class _Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [_Interrupt, KeyboardInterrupt])
def test_an_interrupt_aborts_the_multipart_upload(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(s3_client, "plan_part_size", lambda size: 5 * MIB)
    files = write_files(tmp_path / "c", {"model.safetensors": bytes(30 * MIB)})

    def interrupt(name: str, size: int) -> None:
        assert remote.open_uploads() == [f"{remote.prefix}/model.safetensors"]
        raise error

    with pytest.raises(error):
        publish(open_target(remote.address), files, on_progress=interrupt)
    assert remote.open_uploads() == []
    assert remote.names() == set()


def test_after_a_kill_the_next_run_aborts_its_own_upload_only(
    remote: Remote, tmp_path: Path, seaweed: SeaweedFS
) -> None:
    files = write_files(tmp_path / "c", {"model.safetensors": bytes(30 * MIB), "config.json": b"{}"})
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from infra import s3_client
        from infra.storage import LocalFile, open_target, publish
        s3_client.plan_part_size = lambda size: 5 << 20
        file = LocalFile("model.safetensors", Path({str(files[0].path)!r}), {files[0].size}, {files[0].sha256!r})
        def on_progress(name, size):
            print("sent", flush=True)
            sys.stdin.read()
        publish(open_target({remote.address!r}), [file], on_progress=on_progress)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "sent\n"
        os.kill(child.pid, signal.SIGKILL)
    foreign = remote.client.create_multipart_upload(Bucket=remote.bucket, Key=f"{remote.prefix}/foreign.bin")
    own = f"{remote.prefix}/model.safetensors"
    assert set(remote.open_uploads()) == {own, foreign["Key"]}
    assert remote.names() == set()
    publish_to(remote.address, files)
    assert remote.open_uploads() == [foreign["Key"]]
    assert remote.read("model.safetensors") == bytes(30 * MIB)


# ---- refusals


def test_a_missing_bucket_is_told_at_preflight(remote: Remote) -> None:
    with pytest.raises(TargetError, match="the bucket does not exist"):
        open_target("s3://no-such-bucket-here/x").preflight()


def test_wrong_credentials_are_told_at_preflight_without_the_secret(
    remote: Remote,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="infra")
    secret = "wrong-planted-secret-77aa"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    start = time.monotonic()
    with pytest.raises(TargetError) as caught:
        open_target(remote.address).preflight()
    assert "credentials" in str(caught.value)
    assert time.monotonic() - start < 20
    given = S3Target(
        remote.bucket, "x", key=SecretStr("AKIAPLANTEDPLANTED00"), secret=SecretStr("second-planted-secret")
    )
    with pytest.raises(TargetError) as second:
        given.preflight()
    told = f"{caught.value!r} {second.value!r} {given!r} {given._objects!r} {capfd.readouterr()} {caplog.text}"
    for planted in (secret, "second-planted-secret", "AKIAPLANTEDPLANTED00", SECRET):
        assert planted not in told


def test_no_credentials_are_told_at_preflight(
    remote: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(TargetError, match="no complete S3 credentials"):
        open_target(remote.address).preflight()


def test_an_endpoint_without_a_server_is_told_at_preflight(remote: Remote) -> None:
    with pytest.raises(TargetError, match=r"head_bucket on bucket \(no answer\)"):
        open_target("s3://bucket/x", endpoint_url="http://127.0.0.1:9").preflight()


def test_given_credentials_and_endpoint_need_no_environment(
    remote: Remote, seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch, make_files: MakeFiles
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    target = S3Target(remote.bucket, "x", endpoint_url=seaweed.endpoint, key=SecretStr(KEY), secret=SecretStr(SECRET))
    receipt = publish(target, make_files(), on_progress=Progress())
    assert SECRET not in json.dumps(receipt)
    assert receipt["address"] == f"s3://{remote.bucket}/x"
