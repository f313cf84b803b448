import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distribute.errors import TargetError
from tasks.export import CHECKPOINT, export_step
from tasks.progress import State, listening
from tasks.run import Run
from tasks.upload import check_target, upload
from tasks.verify import verify_step

FILES = {"model.safetensors": b"weights" * 100, "config.json": b"{}", "code/modeling.py": b"pass"}


@pytest.fixture
def verified(make_run: Callable[..., Run], tmp_path: Path) -> Run:
    run = make_run(target=str(tmp_path / "out"))
    folder = export_step(run).folder / CHECKPOINT
    records = []
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        records.append({"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    verify_step(run).folder.mkdir(parents=True)
    (verify_step(run).folder / "verify.json").write_text(json.dumps({"files": records}))
    return run


def test_the_verified_files_arrive_and_the_receipt_stays(verified: Run, tmp_path: Path) -> None:
    told: list[State] = []
    with listening(told.append):
        receipt = upload(verified)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in FILES} == FILES
    assert json.loads((verified.folder / "receipt.json").read_text()) == receipt
    assert receipt["address"] == str(tmp_path / "out")
    total = sum(map(len, FILES.values()))
    assert (told[-1].done, told[-1].total, told[-1].unit) == (total, total, "bytes")


def test_a_file_that_changed_after_verify_is_not_published(verified: Run, tmp_path: Path) -> None:
    (export_step(verified).folder / CHECKPOINT / "config.json").write_bytes(b"[]")
    with pytest.raises(Exception, match="run the export again"):
        upload(verified)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_target_with_other_files_needs_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(TargetError, match="not empty"):
        check_target(str(tmp_path), False)
    check_target(str(tmp_path), True)
