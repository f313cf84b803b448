"""The order of the stages, without ranks: `call` records what would run."""

from pathlib import Path
from typing import Any

import pytest

from distribute.errors import DataError, RecipeError, SourceError, TargetError, UserError, WorkspaceError
from flows.parameters import Parameters
from flows.pipeline import STAGES, run_pipeline

STAGE_NAMES = [stage.__name__ for stage in STAGES]


class Recorder:
    """Calls what comes before the stages; of the rest it only notes the name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, function: Any, *args: Any) -> Any:
        self.names.append(function.__name__)
        return None if function.__name__ in (*STAGE_NAMES, "upload", "report") else function(*args)


def run(parameters: Parameters, **changes: Any) -> list[str]:
    recorder = Recorder()
    run_pipeline(parameters.model_copy(update=changes), recorder)
    return recorder.names


def test_everything_is_checked_before_the_first_stage(parameters: Parameters, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    checks = ["check_workspace", "check_target", "fetch_data", "fetch_source", "check_run"]
    names = run(parameters, recipe="fp8", calib=str(text), target=str(tmp_path / "out"))
    assert names == [*checks, *STAGE_NAMES, "upload", "report"]


def test_without_a_target_nothing_is_uploaded(parameters: Parameters) -> None:
    names = run(parameters)
    assert names == ["check_workspace", "fetch_source", "check_run", *STAGE_NAMES, "report"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recipe": "int3"}, RecipeError, "neither a preset nor a file"),
        ({"recipe": "fp8"}, DataError, "give --calib FILE"),
        ({"recipe": "fp8", "calib": "none.txt"}, DataError, "none.txt"),
        ({"model": "/no/folder"}, SourceError, "/no/folder"),
        ({"target": "ftp://host/x"}, TargetError, "unknown"),
        ({"target": __file__}, TargetError, "is a file; name a folder"),
        ({"workspace": "/proc/nogather"}, WorkspaceError, "--workspace"),
    ],
)
def test_a_users_mistake_ends_the_run_before_any_stage(
    parameters: Parameters, changes: dict[str, str], error: type[UserError], message: str
) -> None:
    recorder = Recorder()
    with pytest.raises(error, match=message):
        run_pipeline(parameters.model_copy(update=changes), recorder)
    assert not set(recorder.names) & set(STAGE_NAMES)


def test_a_wrong_variable_of_the_environment_is_named(
    parameters: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOGATHER_NPROC", "two")
    with pytest.raises(WorkspaceError, match="NOGATHER_NPROC='two' cannot be used"):
        run(parameters)
