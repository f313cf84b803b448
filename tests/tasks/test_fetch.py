"""Sources and data: local ones, and the real Hub client against a Hub on loopback."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from distribute.errors import DataError, SourceError, StageError
from distribute.plan import make_plan
from distribute.recipe import Recipe
from distribute.source import Checkpoint, read_header
from tasks.fetch import choose_data_file, fetch_data, fetch_source
from tasks.headers import fetch_headers
from tests.checkpoints import decoder_tensors, write_checkpoint
from tests.hub_server import READER, HubServer, Reply


class Hub(HubServer):
    """Data sets by the same routes as models."""

    def _route(self, method: str, path: str, *rest: object) -> Reply:
        return super()._route(
            method, path.replace("/api/datasets/", "/api/models/").replace("/datasets/", "/"), *rest
        )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with Hub.started(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_TOKEN", READER)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", decoder_tensors(), files=2)


def revision(folder: Path) -> str:
    return fetch_source(str(folder), Path("unused")).revision


def test_a_local_folder_is_used_where_it_lies(checkpoint: Path, tmp_path: Path) -> None:
    source = fetch_source(str(checkpoint), tmp_path / "workspace")
    assert (source.address, source.folder) == (str(checkpoint), checkpoint)
    assert not (tmp_path / "workspace").exists()
    assert source.revision == revision(checkpoint)


def test_saving_other_weights_or_side_files_changes_the_revision(checkpoint: Path) -> None:
    before = revision(checkpoint)
    write_checkpoint(checkpoint, decoder_tensors(seed=1), files=2)  # same names and sizes
    trained = revision(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    with_tokenizer = revision(checkpoint)
    (checkpoint / "tokenizer.json").write_text('{"a": 1}')
    assert len({before, trained, with_tokenizer, revision(checkpoint)}) == 4


@pytest.mark.parametrize("model", ["/no/such/folder", "no such model", "", "org/name/more"])
def test_what_is_neither_folder_nor_repository_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        fetch_source(model or "x", tmp_path)


def test_a_hub_model_is_fetched_at_its_commit_without_pickles(
    hub: HubServer, checkpoint: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    never = {
        "pytorch_model.bin": b"x",
        "original/model.safetensors": b"x",
        "model.gguf": b"x",
        "a/model.pt": b"x",
    }
    commit = hub.add_repo("org/model", files | never | {"tokenizer.json": b"{}"})
    source = fetch_source("org/model", tmp_path)
    assert source.folder == tmp_path / "sources" / "org--model" / commit
    fetched = {
        path.relative_to(source.folder).as_posix()
        for path in source.folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }
    assert fetched == {*files, "tokenizer.json"}
    assert (source.folder / "model-00001-of-00002.safetensors").read_bytes() == files[
        "model-00001-of-00002.safetensors"
    ]
    again = fetch_source("hf://org/model@main", tmp_path)
    assert (again.folder, again.revision) == (source.folder, source.revision)


def test_a_model_that_does_not_exist_is_the_users_to_change(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"models/none is no folder here, .* does not exist or may not be read \(404\)"
    ):
        fetch_source("models/none", tmp_path)


def test_a_hub_that_fails_may_be_tried_again(hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    hub.add_repo("org/model", {path.name: path.read_bytes() for path in checkpoint.iterdir()})
    hub.fail("GET", "/api/models/org/model", status=500, times=1)
    with pytest.raises(StageError, match="try again later") as raised:
        fetch_source("org/model", tmp_path)
    assert READER not in str(raised.value)
    assert fetch_source("org/model", tmp_path).folder.is_dir()


def test_a_hub_data_set_gives_the_first_file_of_its_split(hub: HubServer, tmp_path: Path) -> None:
    row = json.dumps({"text": "hello"}).encode()
    commit = hub.add_repo(
        "org/data", {"data/test.jsonl": b"{}", "data/train-1.jsonl": b"{}", "data/train-0.jsonl": row}
    )
    data = fetch_data("hf://datasets/org/data", tmp_path)
    assert data.path == tmp_path / "data" / "org--data" / commit / "data" / "train-0.jsonl"
    assert data.path.read_bytes() == row
    with pytest.raises(DataError, match=r"holds no .* file of split valid; its files: data/test.jsonl"):
        fetch_data("hf://datasets/org/data:valid", tmp_path)


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["b/train-00001.parquet", "b/train-00000.parquet", "train.jsonl"], None, "b/train-00000.parquet"),
        (["data/test.parquet", "all.txt"], None, "data/test.parquet"),
        (["data/constrain.txt", "data/train.txt"], "train", "data/train.txt"),
        (["validation.jsonl", "train.jsonl", "README.md"], "validation", "validation.jsonl"),
    ],
)
def test_the_file_of_a_split_is_chosen_by_name(names: list[str], split: str | None, chosen: str) -> None:
    assert choose_data_file(names, split, repo="org/data") == chosen


def test_data_is_named_by_its_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("some text")
    second.write_text("some text")
    assert fetch_data(str(first), tmp_path).digest == fetch_data(str(second), tmp_path).digest
    both = fetch_data(str(tmp_path), tmp_path).digest
    second.write_text("other text")
    assert both != fetch_data(str(tmp_path), tmp_path).digest
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("empty.txt", ""), ("text.docx", "x"), ("model.bin", "x")])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=name):
        fetch_data(str(tmp_path / name), tmp_path)


def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"texts/calib.txt is neither an existing file"):
        fetch_data("texts/calib.txt", tmp_path)


def test_a_hub_model_is_planned_from_headers_alone(hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    hub.add_repo("org/model", {path.name: path.read_bytes() for path in checkpoint.iterdir()})
    stubs = fetch_headers("org/model", tmp_path)
    weights = sorted(checkpoint.glob("*.safetensors"))
    assert sorted(path.name for path in stubs.glob("*.safetensors")) == [path.name for path in weights]
    for path in stubs.glob("*.safetensors"):
        header, data = read_header(path)
        assert header and not any(path.read_bytes()[data:])
    planned, real = (make_plan(Checkpoint.open(folder), Recipe(), 500) for folder in (stubs, checkpoint))
    assert (planned.outputs, planned.decisions) == (real.outputs, real.decisions)
    assert fetch_headers("org/model", tmp_path) == stubs
    assert fetch_headers(str(checkpoint), tmp_path) == checkpoint


def test_an_index_of_the_hub_that_leads_elsewhere_is_refused(hub: HubServer, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../x.safetensors"}}
    hub.add_repo("org/model", {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(SourceError, match="no file of this model"):
        fetch_headers("org/model", tmp_path)
