"""The flow under a real Prefect server, with the real stages on one rank."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from distribute.errors import StageError, TargetError
from flows.parameters import Parameters

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="session")
def flow(prefect_server: None) -> Any:
    # Late: the flow's module imports prefect.
    from flows.quantize_model import quantize_model  # noqa: PLC0415

    return quantize_model


@pytest.fixture(scope="session")
def built(flow: Any, parameters: Parameters) -> dict[str, Any]:
    """A run with ranks: other tests of the session may have left stages to reuse, but never its last one."""
    shutil.rmtree(Path(parameters.workspace) / "verify", ignore_errors=True)
    return flow(parameters)


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import prefect_tasks  # noqa: PLC0415  late: imports prefect
    from tasks.upload import upload  # noqa: PLC0415

    quick = prefect_tasks.TASKS[upload].with_options(retry_delay_seconds=0)
    monkeypatch.setitem(prefect_tasks.TASKS, upload, quick)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of stages whose ranks were started; starting any is an error here."""
    started: list[str] = []

    def run_ranks(command: Any, **_: Any) -> None:
        started.append(str(command.folder))
        raise StageError("no ranks in this test")

    monkeypatch.setattr("tasks.stage.run_ranks", run_ranks)
    return started


def ask(question: Callable[[Any], Any]) -> Any:
    """What the server answers."""
    from prefect import get_client  # noqa: PLC0415  late: see above

    async def answer() -> Any:
        async with get_client() as client:
            return await question(client)

    return asyncio.run(answer())


def task_runs(flow_run_id: UUID) -> dict[str, Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId  # noqa: PLC0415

    only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    found = ask(lambda client: client.read_task_runs(flow_run_filter=only))
    return {run.name.rpartition("-")[0]: run for run in found}


def test_a_run_makes_a_checkpoint_and_shows_its_report(built: dict[str, Any]) -> None:
    assert (Path(built["checkpoint"]) / "model.safetensors").is_file()
    assert built["stages"][3]["reused"] is False
    artifacts = ask(lambda client: client.read_artifacts())
    kinds = {artifact.key.split("-tmp-")[0]: artifact.type for artifact in artifacts}
    assert {"markdown", "table"} <= set(kinds.values())
    markdown = next(artifact for artifact in artifacts if artifact.type == "markdown")
    assert markdown.data == Path(built["report"]).read_text()


def test_an_upload_is_tried_again_and_nothing_else_is_redone(
    flow: Any,
    built: dict[str, Any],
    parameters: Parameters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launches: list[str],
    no_delay: None,
) -> None:
    from infra.storage import publish  # noqa: PLC0415

    attempts = []

    def flaky(*args: Any, **kwargs: Any) -> Any:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("the network is gone")
        return publish(*args, **kwargs)

    monkeypatch.setattr("tasks.upload.publish", flaky)
    out = tmp_path / "out"
    state = flow(parameters.model_copy(update={"target": str(out)}), return_state=True)
    assert state.is_completed(), state
    summary = state.result()
    assert summary["address"] == str(out)
    assert all(stage["reused"] for stage in summary["stages"])
    assert (len(attempts), launches) == (3, [])
    assert {path.name for path in out.iterdir()} >= {"model.safetensors", "config.json"}
    runs = task_runs(state.state_details.flow_run_id)
    assert runs["upload"].run_count == 3
    assert {name: run.run_count for name, run in runs.items() if name != "upload"} == dict.fromkeys(
        ("check_workspace", "check_target", "fetch_source", "check_run", "calibrate", "quantize", "export", "verify",
         "report"), 1,
    )  # fmt: skip


def test_a_users_mistake_is_never_tried_again(
    flow: Any, built: dict[str, Any], parameters: Parameters, launches: list[str], no_delay: None
) -> None:
    state = flow(parameters.model_copy(update={"target": __file__}), return_state=True)
    assert state.is_failed()
    with pytest.raises(TargetError, match="is a file"):
        state.result()
    runs = task_runs(state.state_details.flow_run_id)
    assert {name: run.run_count for name, run in runs.items()} == {"check_workspace": 1, "check_target": 1}
    assert launches == []


def test_an_altered_artifact_is_rebuilt_although_prefect_saw_it_succeed(
    flow: Any, built: dict[str, Any], parameters: Parameters, launches: list[str]
) -> None:
    folder = Path(built["stages"][1]["folder"])
    plan = (folder / "plan.json").read_text()
    manifest = (folder / "manifest.json").read_text()
    (folder / "plan.json").write_text("{}")
    try:
        with pytest.raises(StageError, match="no ranks in this test"):
            flow(parameters)
        assert launches == [str(folder)]
    finally:  # the workspace is shared by the tests of a session
        (folder / "plan.json").write_text(plan)
        (folder / "manifest.json").write_text(manifest)


def test_our_log_lines_reach_the_server(flow: Any, built: dict[str, Any], parameters: Parameters) -> None:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId  # noqa: PLC0415
    from prefect.logging.handlers import APILogHandler  # noqa: PLC0415

    state = flow(parameters, return_state=True)
    APILogHandler().flush()
    only = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[state.state_details.flow_run_id]))
    lines = [log.message for log in ask(lambda client: client.read_logs(log_filter=only))]
    assert any("calibrate: " in line and "key" in line for line in lines), lines


def test_progress_is_one_artifact_and_none_of_the_log(
    flow: Any, built: dict[str, Any], parameters: Parameters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from flows.display import shown  # noqa: PLC0415

    sent: list[logging.LogRecord] = []
    monkeypatch.setattr("tasks.prefect_tasks.APILogHandler.emit", lambda _, record: sent.append(record))
    with shown(bars=False):
        state = flow(parameters.model_copy(update={"target": str(tmp_path / "out")}), return_state=True)
    artifacts = ask(lambda client: client.read_artifacts())
    run_id = state.state_details.flow_run_id
    bars = [made for made in artifacts if made.flow_run_id == run_id and made.type == "progress"]
    assert [bar.data for bar in bars] == [100.0]
    assert bars[0].description.startswith("upload: ")
    assert sent and not [record for record in sent if record.name in ("progress", "flows.display")]


def test_a_server_that_fails_to_show_progress_fails_nothing(
    flow: Any, built: dict[str, Any], parameters: Parameters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def fail(*args: Any, **_: Any) -> None:
        calls.append(args)
        raise ConnectionError("the server is gone")

    monkeypatch.setattr("tasks.prefect_tasks.create_progress_artifact", fail)
    state = flow(parameters.model_copy(update={"target": str(tmp_path / "out")}), return_state=True)
    assert state.is_completed() and calls


def test_secrets_are_hidden_in_what_is_sent(flow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.prefect_tasks import logs_to_prefect  # noqa: PLC0415

    sent: list[str] = []
    monkeypatch.setattr("tasks.prefect_tasks.APILogHandler.emit", lambda _, record: sent.append(record.getMessage()))
    with logs_to_prefect():
        logging.getLogger("infra.s3").info("%s", "s3://KEY:SECRET@bucket")
    assert sent == ["s3://***@bucket"]
