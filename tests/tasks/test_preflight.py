import logging
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from distribute.errors import DataError, RecipeError, SourceError, TargetError, WorkspaceError
from tasks.export import export_step
from tasks.fetch import fetch_source
from tasks.preflight import SPARE_BYTES, check_run, check_workspace
from tasks.run import Run
from tests.checkpoints import decoder_tensors, write_checkpoint

MakeRun = Callable[..., Run]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def real_run(make_run: MakeRun, tmp_path: Path) -> Run:
    folder = write_checkpoint(tmp_path / "model", decoder_tensors())
    return make_run(source=fetch_source(str(folder), tmp_path), recipe={"preset": "fp8_dynamic"})


def test_a_run_that_fits_is_described(real_run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_run(real_run)
    assert "14 of 16 modules are quantized" in caplog.text


def test_a_full_disk_is_met_before_any_rank(real_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 5, 5))
    with pytest.raises(WorkspaceError, match=r"has 5 B free but 64 MB are needed; make room"):
        check_run(real_run)


def test_what_an_earlier_attempt_wrote_is_not_needed_again(real_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 5, 1000))
    folder = export_step(real_run).folder
    folder.mkdir(parents=True)
    (folder / "half.safetensors").write_bytes(os.urandom(SPARE_BYTES + 10_000))
    check_run(real_run)


def test_an_already_quantized_source_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", decoder_tensors(), quantization_config={"quant_method": "fp8"})
    with pytest.raises(SourceError, match="already quantized"):
        check_run(make_run(source=fetch_source(str(folder), tmp_path)))


def test_missing_text_and_useless_patterns_are_met_before_any_rank(make_run: MakeRun, tmp_path: Path) -> None:
    source = fetch_source(str(write_checkpoint(tmp_path / "model", decoder_tensors())), tmp_path)
    with pytest.raises(DataError, match="--calib FILE"):
        check_run(make_run(source=source, data=None))
    with pytest.raises(RecipeError, match="matches no module"):
        check_run(make_run(source=source, recipe={"preset": "fp8", "ignore": ["nothing.*"]}))


def test_a_workspace_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match=r"cannot be made .*; choose another with --workspace"):
        check_workspace(tmp_path / "file" / "workspace")
    assert check_workspace(tmp_path / "new" / "workspace").is_dir()


@pytest.mark.parametrize("place", [".", "below/it", ".."])
def test_a_target_that_would_overwrite_the_source_is_refused(real_run: Run, place: str) -> None:
    target = str(real_run.source.folder / place)
    before = {path: path.read_bytes() for path in real_run.source.folder.iterdir()}
    for overwrite in (False, True):
        with pytest.raises(TargetError, match="would overwrite the source"):
            check_run(replace(real_run, target=target, overwrite=overwrite))
    assert {path: path.read_bytes() for path in real_run.source.folder.iterdir()} == before


def test_a_workspace_in_the_source_is_refused(real_run: Run) -> None:
    with pytest.raises(WorkspaceError, match="lies in the source"):
        check_run(replace(real_run, workspace=real_run.source.folder / "ws"))


@pytest.mark.parametrize("name", ["a\nb.txt", "c:d.txt", b"caf\xe9.txt"])
def test_a_side_file_that_no_target_takes_is_met_at_once(tmp_path: Path, name: str | bytes) -> None:
    folder = write_checkpoint(tmp_path / "model", decoder_tensors())
    Path(os.path.join(str(folder), os.fsdecode(name))).write_text("x")
    with pytest.raises(SourceError, match="cannot be published; rename or remove it"):
        fetch_source(str(folder), tmp_path)
