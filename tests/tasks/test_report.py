import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.launch import RankCommand
from tasks.calibrate import calibrate_step
from tasks.export import export_step
from tasks.plots import sqnr_by_kind
from tasks.quantize import quantize_step
from tasks.report import report, worst_tensors
from tasks.run import Run
from tasks.stage import StageResult, run_step
from tasks.step import Step
from tasks.verify import verify_step
from tests.tasks.fake_worker import ARTIFACTS

TENSORS = [
    {"name": f"model.layers.{layer}.mlp.{leaf}.weight", "codec": "fp8", "sqnr_db": 30.0 + layer, "source_bytes": 8,
     "bytes": 4}
    for layer in range(12) for leaf in ("up_proj", "down_proj")
]  # fmt: skip


@pytest.fixture
def finished(make_run: Callable[..., Run]) -> Run:
    run = make_run()
    plan = {
        "source_bytes": 2000,
        "files": [{"name": "model.safetensors", "size": 1200}],
        "decisions": [
            {"module": "lm_head", "action": "keep", "reason": "output head, left by default (*lm_head*)"},
            {
                "module": "model.layers.0.mlp.up_proj",
                "action": "quantize",
                "reason": "linear layer",
                "preset": "int4",
                "group_size": 64,
            },
        ],
    }
    exact = TENSORS[0] | {"name": "model.layers.0.mlp.zero.weight", "sqnr_db": None}
    verdict = {"ok": True, "checks": [], "files": [{}, {}], "tensors": [exact, *TENSORS]}
    for step, name, value in (
        (quantize_step(run), "plan.json", plan),
        (quantize_step(run), "coverage.json", {"model.layers.0.mlp.experts": [7, 0, 3]}),
        (verify_step(run), "verify.json", verdict),
    ):
        step.folder.mkdir(parents=True, exist_ok=True)
        (step.folder / name).write_text(json.dumps(value))
    return run


def stages(run: Run) -> list[StageResult]:
    def result(step: Step, reused: bool, **figures: Any) -> StageResult:
        return StageResult(
            step.stage, step.key, step.folder, reused, "first run", 1.5, (2 * 10**8, 3 * 10**8), figures
        )

    return [
        result(calibrate_step(run), True, samples=500, tokens=9000),
        result(quantize_step(run), False, warnings=["few samples"]),
        result(export_step(run), False),
        result(verify_step(run), False, warnings=["few samples"]),
    ]


def test_the_report_tells_what_a_person_asks(finished: Run) -> None:
    receipt = {"address": "s3://bucket/model", "revision": None, "uploaded_bytes": 1200, "seconds": 2.25}
    made = report(finished, stages(finished), receipt)
    text = (finished.folder / "report.md").read_text()
    assert text == made.markdown
    for line in (
        "# org/model: fp8, modelopt",
        "| source | org/model, 2 kB |",
        "| size against source | 60.0% |",
        "| published | s3://bucket/model |",
        r"| keep |  | output head, left by default (\*lm_head\*) | 1 | lm_head |",
        "| quantize | int4, groups of 64 | linear layer | 1 | model.layers.0.mlp.up_proj |",
        "| model.layers.0.mlp.up_proj.weight | fp8 | 30.0 |",
        "| calibrate | 1.5 | 200 MB, 300 MB | reused; seconds and memory are of the run that made it |",
        "| export | 1.5 | 200 MB, 300 MB | built: first run |",
        "| upload | 2.25 | no ranks | sent 1.2 kB |",
        "| samples | 500 |",
        "| tokens | 9000 |",
        "| sequence length | 512 |",
        "| seed | 0 |",
        "![SQNR by layer](sqnr.png)",
        "- few samples",
    ):
        assert line in text.splitlines()
    assert text.count("few samples") == 1


def test_the_summary_is_kept_as_json(finished: Run) -> None:
    made = report(finished, stages(finished), None)
    assert json.loads((finished.folder / "run.json").read_text()) == made.summary
    assert made.summary["ratio"] == 0.6
    assert made.summary["worst_sqnr_db"] == 30.0
    assert made.summary["address"] is None
    assert [stage["reused"] for stage in made.summary["stages"]] == [True, False, False, False]


def test_the_plot_is_a_picture(finished: Run) -> None:
    report(finished, stages(finished), None)
    png = (finished.folder / "sqnr.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(png) > 5000


def test_the_worst_tensors_come_first_and_exact_ones_never() -> None:
    rows = worst_tensors([TENSORS[0] | {"sqnr_db": None}, *TENSORS])
    assert len(rows) == 10
    assert [row["SQNR (dB)"] for row in rows] == sorted(row["SQNR (dB)"] for row in rows)
    assert rows[0]["SQNR (dB)"] == 30.0


def test_experts_share_a_line_that_shows_the_worst() -> None:
    rows = [
        {
            "name": f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
            "sqnr_db": 30.0 + expert - layer,
        }
        for layer in range(2)
        for expert in range(3)
    ]
    assert sqnr_by_kind([*rows, {"name": "lm_head.weight", "sqnr_db": 1.0}]) == {
        "mlp.experts.up_proj": {0: 30.0, 1: 29.0}
    }


def test_paths_in_the_summary_are_absolute(finished: Run) -> None:
    assert Path(report(finished, stages(finished), None).summary["checkpoint"]).is_absolute()


def test_warnings_of_built_and_reused_stages_are_told_once_a_run(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run_ranks(command: RankCommand, **_: Any) -> None:
        stage = json.loads((command.folder / "job.json").read_text())["stage"]
        for name in ARTIFACTS[stage]:
            (command.folder / name).write_text("{}")
        result = {"peak_memory_bytes": [1, 1], "figures": {"warnings": ["few samples"]}}
        (command.folder / "result.json").write_text(json.dumps(result))

    monkeypatch.setattr("tasks.stage.run_ranks", run_ranks)
    for run_id, reused in (("first", False), ("second", True)):
        caplog.clear()
        run = make_run(run_id=run_id)
        assert [run_step(step(run)).reused for step in (calibrate_step, quantize_step)] == [reused, reused]
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert told == ["warning: few samples"]


def test_presets_and_tokens_of_experts_are_told(finished: Run) -> None:
    text = report(finished, stages(finished), None).markdown
    assert "| quantize | int4, groups of 64 | linear layer | 1 |" in text
    assert "| model.layers.0.mlp.experts | 3 | 0 | 3 | 7 | 1 |" in text
