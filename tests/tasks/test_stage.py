"""Reuse, rebuild and resume of a stage, with a fake worker under the real file contract."""

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distribute.errors import DataError, LaunchError, WorkspaceError
from tasks.calibrate import calibrate_step
from tasks.export import export_step
from tasks.progress import State, listening
from tasks.quantize import quantize_step
from tasks.run import Calibration, Run
from tasks.stage import StageResult, run_step
from tasks.step import Step
from tests.tasks.conftest import WORKER

MakeRun = Callable[..., Run]
pytestmark = pytest.mark.usefixtures("plain_ranks")


def build(step: Step, mode: str = "ok", **options: str) -> StageResult:
    os.environ["FAKE_WORKER"] = mode
    return run_step(step, job_options=dict(options), worker=WORKER)


@pytest.fixture(autouse=True)
def _clean_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER", "ok")


def test_the_first_run_builds_and_the_second_reuses(make_run: MakeRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    step = calibrate_step(make_run())
    first, second = build(step), build(step)
    assert (first.reused, first.reason) == (False, "first run")
    assert second.reused
    assert second.figures == first.figures
    assert second.peak_memory_bytes == (100, 200)
    messages = [record.getMessage() for record in caplog.records]
    assert f"calibrate: building, first run (key {step.key})" in messages
    assert f"calibrate: reused (key {step.key})" in messages


def test_the_job_holds_what_the_stage_needs(make_run: MakeRun) -> None:
    run = make_run()
    step = quantize_step(run)
    job = build(step, extra="path").figures["job"]
    assert job["source"] == str(run.source.folder)
    assert job["inputs"] == {"calibration": str(calibrate_step(run).folder)}
    assert job["options"] == {
        "max_shard_bytes": run.max_shard_bytes,
        "fail_on_unrouted_experts": False,
        "extra": "path",
    }
    assert job["recipe"]["preset"] == "fp8"
    assert job["folder"] == str(step.folder)


def test_the_manifest_records_every_artifact_and_nothing_else(make_run: MakeRun) -> None:
    step = export_step(make_run())
    build(step)
    manifest = json.loads((step.folder / "manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == [
        "begun",
        "checkpoint/config.json",
        "checkpoint/model.safetensors",
        "result.json",
    ]
    assert manifest["key"] == step.key
    assert manifest["made_from"] == step.made_from
    assert manifest["world_size"] == 2


@pytest.mark.parametrize("artifact", ["plan.json", "plan.safetensors", "result.json"])
def test_an_altered_artifact_is_named_and_everything_is_rebuilt(make_run: MakeRun, artifact: str) -> None:
    step = quantize_step(make_run())
    build(step)
    path = step.folder / artifact
    content = path.read_bytes()
    path.write_bytes(b"X" + content[1:])  # same size, other time
    again = build(step)
    assert (again.reused, again.reason) == (False, f"{artifact} was altered")
    assert again.figures["resumed"] is False  # nothing of the altered folder was used
    assert path.read_bytes() == content
    assert build(step).reused


def test_a_removed_artifact_is_named(make_run: MakeRun) -> None:
    step = export_step(make_run())
    build(step)
    shutil.rmtree(step.folder / "checkpoint")
    assert build(step).reason == "checkpoint/config.json is gone"


def test_an_artifact_that_was_altered_and_given_its_old_time_is_noticed(make_run: MakeRun) -> None:
    step = quantize_step(make_run())
    build(step)
    path = step.folder / "plan.safetensors"
    before = path.stat()
    path.write_bytes(b"X" + path.read_bytes()[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert build(step).reason == "plan.safetensors was altered"


def test_a_touched_artifact_with_the_same_bytes_is_reused(make_run: MakeRun) -> None:
    step = quantize_step(make_run())
    build(step)
    os.utime(step.folder / "plan.json", (1, 1))
    assert build(step).reused


@pytest.mark.parametrize("text", ["", "{", '{"key": 1}', "[]"])
def test_a_damaged_manifest_does_not_count(make_run: MakeRun, text: str) -> None:
    step = quantize_step(make_run())
    build(step)
    (step.folder / "manifest.json").write_text(text)
    again = build(step)
    assert not again.reused
    assert "manifest.json" in again.reason


def test_a_killed_stage_is_continued(make_run: MakeRun) -> None:
    step = calibrate_step(make_run())
    with pytest.raises(LaunchError, match="SIGKILL"):
        build(step, "die")
    assert not (step.folder / "manifest.json").exists()
    again = build(step)
    assert (again.reused, again.reason) == (False, "the last attempt did not finish")
    assert again.figures["resumed"] is True


def test_a_failed_stage_leaves_no_error_behind_for_the_next_attempt(make_run: MakeRun) -> None:
    step = calibrate_step(make_run())
    with pytest.raises(DataError, match="the text is empty"):
        build(step, "user")
    assert (step.folder / "error-0.json").exists()
    assert not build(step).reused
    assert not list(step.folder.glob("error-*"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": {"preset": "fp8_dynamic"}}, "recipe.preset: fp8 -> fp8_dynamic"),
        ({"calibration": Calibration(samples=64)}, "options.samples: 512 -> 64"),
    ],
)
def test_what_changed_since_the_last_run_is_named(make_run: MakeRun, changes: dict, reason: str) -> None:
    build(calibrate_step(make_run()))
    again = build(calibrate_step(make_run(**changes)))
    assert not again.reused
    assert again.reason.startswith("changed since the last run: ")
    assert reason in again.reason


def test_another_model_in_the_same_workspace_is_a_first_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    build(calibrate_step(run))
    other = make_run(source=type(run.source)("org/other", tmp_path, "c" * 64))
    assert build(calibrate_step(other)).reason == "first run"


def test_another_run_at_the_same_stage_is_an_error(make_run: MakeRun) -> None:
    step = calibrate_step(make_run())
    step.folder.mkdir(parents=True)
    with (step.folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(WorkspaceError, match=r"another run has been working at calibrate .* --workspace"):
            build(step)


def test_a_run_waits_for_the_lock_of_a_dying_one(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOGATHER_LOCK_WAIT_S", "20")
    step = calibrate_step(make_run())
    step.folder.mkdir(parents=True)
    held = os.open(step.folder / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)

    def release() -> None:
        time.sleep(0.8)
        os.close(held)

    thread = threading.Thread(target=release)
    thread.start()
    assert not build(step).reused
    thread.join()


def test_the_lock_is_given_to_the_ranks(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    step = calibrate_step(make_run())
    seen = []

    def run_ranks(command: object, *, lock_fd: int, **_: object) -> None:
        with (step.folder / ".lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen.append(os.fstat(lock_fd).st_ino)
        raise LaunchError("enough")

    monkeypatch.setattr("tasks.stage.run_ranks", run_ranks)
    with pytest.raises(LaunchError, match="enough"):
        build(step)
    assert seen == [(step.folder / ".lock").stat().st_ino]


def test_progress_is_summed_over_ranks(make_run: MakeRun) -> None:
    told: list[State] = []
    with listening(told.append):
        build(calibrate_step(make_run()))
    assert told == [State("calibrate", "calibrate", done=2, total=4, unit="tokens")]


def test_a_workspace_that_cannot_be_made_is_the_users_to_change(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="--workspace"):
        build(calibrate_step(make_run(workspace=tmp_path / "file")))


def test_hashes_made_by_export_are_not_made_again(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    step = export_step(make_run())
    hashed: list[str] = []

    def sha256_of(path: Path) -> str:
        hashed.append(path.name)
        return "0" * 64

    def run_ranks(command: object, **_: object) -> None:
        (step.folder / "checkpoint").mkdir()
        (step.folder / "checkpoint/model.safetensors").write_bytes(b"12345")
        files = [{"name": "model.safetensors", "size": 5, "sha256": "f" * 64}]
        (step.folder / "files.json").write_text(json.dumps(files))
        (step.folder / "result.json").write_text(json.dumps({"peak_memory_bytes": [], "figures": {}}))

    monkeypatch.setattr("tasks.manifest.sha256_of", sha256_of)
    monkeypatch.setattr("tasks.stage.run_ranks", run_ranks)
    build(step)
    assert hashed == ["files.json", "result.json"]
    manifest = json.loads((step.folder / "manifest.json").read_text())
    assert manifest["files"][0] | {"mtime_ns": 0, "ctime_ns": 0} == {
        "name": "checkpoint/model.safetensors",
        "size": 5,
        "mtime_ns": 0,
        "ctime_ns": 0,
        "sha256": "f" * 64,
    }
