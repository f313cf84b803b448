"""Which rank failed first, and which error that makes in the flow process."""

import json
import os

import pytest

from distribute.errors import LaunchError, SourceError, VerifyError
from infra.failure import (
    RankFailure,
    as_error,
    describe_exit,
    describe_progress,
    explain_end,
    find_failure,
    first_failure,
    read_failures,
)  # fmt: skip
from infra.supervisor import ExitRecord


def write_failure(folder, rank, moment, **values):
    record = {"rank": rank, "kind": "internal", "type": "ValueError", "message": "m", "traceback": "", "time": 0.0}
    path = folder / f"error-{rank}.json"
    path.write_text(json.dumps(record | values))
    os.utime(path, (moment, moment))


def failed(**values) -> ExitRecord:
    return ExitRecord(started=0, reason="failed", exit_code=1, **values)


def test_first_failure_is_the_earliest():
    failures = [RankFailure(0, "late", time=3.0), RankFailure(2, "first", time=1.0), RankFailure(1, "next", time=1.5)]
    assert first_failure(failures) == failures[1]
    assert first_failure([]) is None


def test_agreed_error_is_taken_from_the_rank_with_the_cause():
    text = "export failed on rank 1: disk full"
    failures = [
        RankFailure(rank, text, type="RankError", traceback="RankError", time=rank, kind="internal")
        for rank in range(3)
    ]
    failures[1] = RankFailure(1, text, type="RankError", traceback="OSError ... direct cause ... RankError", time=1)
    assert first_failure(failures) == failures[1]


def test_unreadable_error_files_are_left_out(tmp_path):
    write_failure(tmp_path, 0, 10)
    (tmp_path / "error-1.json").write_text('{"rank": 1')
    (tmp_path / "error-2.json").write_text("[]")
    assert [failure.rank for failure in read_failures(tmp_path)] == [0]


def test_exception_of_the_first_rank_is_found(tmp_path):
    write_failure(tmp_path, 0, 20, message="Connection closed by peer")
    write_failure(tmp_path, 1, 10, message="the cause")
    record = failed(first_failure={"rank": 1, "exit_code": 1, "time": 11.0})
    assert find_failure(tmp_path, record).message == "the cause"


def test_silent_death_before_the_others_is_the_cause(tmp_path):
    write_failure(tmp_path, 0, 20, message="Connection closed by peer")
    found = find_failure(tmp_path, failed(first_failure={"rank": 1, "exit_code": -9, "time": 19.0}))
    assert (found.rank, found.type) == (1, "")
    assert "SIGKILL" in found.message


def test_silent_death_after_an_exception_is_not(tmp_path):
    write_failure(tmp_path, 0, 20, message="the cause")
    found = find_failure(tmp_path, failed(first_failure={"rank": 1, "exit_code": -6, "time": 21.0}))
    assert (found.rank, found.message) == (0, "the cause")


def test_errors_of_ranks_that_were_ended_do_not_count(tmp_path):
    write_failure(tmp_path, 0, 20)
    assert find_failure(tmp_path, ExitRecord(started=0, reason="deadline")) is None


@pytest.mark.parametrize(("name", "cls"), [("SourceError", SourceError), ("VerifyError", VerifyError)])
def test_own_errors_keep_class_and_sentence(tmp_path, name, cls):
    error = as_error(RankFailure(0, "one sentence.", type=name, kind="user"), tmp_path / "log")
    assert type(error) is cls
    assert str(error) == "one sentence."


def test_other_errors_name_rank_cause_and_log(tmp_path):
    text = "Traceback (most recent call last):\n  File x\nRuntimeError: THE CAUSE\n"
    error = as_error(RankFailure(1, "THE CAUSE", type="RuntimeError", traceback=text), tmp_path / "rank-1.log")
    assert type(error) is LaunchError
    assert str(error) == f"rank 1 failed: RuntimeError: THE CAUSE; full log: {tmp_path}/rank-1.log"


def test_rank_error_names_its_own_ranks(tmp_path):
    error = as_error(RankFailure(0, "export failed on rank 3: disk full", type="RankError"), tmp_path / "log")
    assert str(error).startswith("export failed on rank 3: disk full; full log: ")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (3, "exit code 3"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL, often the kernel's"),
        (-99, "killed by signal 99"),
    ],
)
def test_exit_codes_are_explained(code, text):
    assert describe_exit(code).startswith(text)


def test_progress_names_the_slowest_rank_first(tmp_path):
    assert describe_progress(tmp_path) == "no rank reported any progress"
    for rank, done in [(0, 10), (1, 4)]:
        state = {"label": "encode", "done": done, "total": 10, "unit": "tensors"}
        (tmp_path / f"progress-{rank}.json").write_text(json.dumps(state))
    assert describe_progress(tmp_path) == "rank 1: encode 4/10 tensors; rank 0: encode 10/10 tensors"
    text = explain_end(tmp_path, ExitRecord(started=0, seconds=61, reason="stalled"))
    assert text.startswith("no rank made progress") and "rank 1: encode 4/10" in text
