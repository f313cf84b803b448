"""Servers and small checkpoints shared by the tests of the targets."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from infra.storage import LocalFile
from tests.hub_server import WRITER, HubServer
from tests.seaweed import KEY, SECRET, SeaweedFS

MakeFiles = Callable[..., list[LocalFile]]


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with SeaweedFS.started(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def bucket(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket on the real server; the environment is set as a user would."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return seaweed.new_bucket()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    with HubServer.started(tmp_path / "hub") as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


@pytest.fixture
def make_files(tmp_path: Path) -> MakeFiles:
    """`make_files(shards=3, seed=0)` writes a checkpoint-like folder; `extra` adds or replaces files."""

    def make(*, shards: int = 3, seed: int = 0, extra: dict[str, bytes] | None = None) -> list[LocalFile]:
        contents = {"tokenizer.json": b'{"t": %d}' % seed, "hf_quant_config.json": b'{"q": %d}' % seed}
        for shard in range(1, shards + 1):
            name = f"model-{shard:05d}-of-{shards:05d}.safetensors"
            contents[name] = hashlib.shake_256(b"%d/%d" % (seed, shard)).digest(2000 + 500 * shard)
        contents["model.safetensors.index.json"] = b'{"shards": %d, "seed": %d}' % (shards, seed)
        contents["config.json"] = b'{"model_type": "llama", "seed": %d}' % seed
        return write_files(tmp_path / f"checkpoint-{shards}-{seed}", contents | (extra or {}))

    return make


def write_files(folder: Path, contents: dict[str, bytes]) -> list[LocalFile]:
    files = []
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        files.append(LocalFile(name, path, len(content), hashlib.sha256(content).hexdigest()))
    return files


def contents_of(files: list[LocalFile]) -> dict[str, bytes]:
    return {file.name: file.path.read_bytes() for file in files}


class Progress:
    """Collects what `on_progress` is told."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}

    def __call__(self, name: str, size: int) -> None:
        self.done[name] = self.done.get(name, 0) + size
