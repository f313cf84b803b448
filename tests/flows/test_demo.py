"""The demo as the command runs it; and how the comparison is shown."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distribute.errors import StageError, UserError
from flows import demo as demonstration
from flows.demo import PROMPT, Demo, Measured, as_json, demo, measure, show
from flows.parameters import Parameters
from flows.pipeline import run_pipeline
from tasks.demo_model import DemoText

SUMMARY = {
    "address": "/somewhere/smollm2-135m-fp8", "report": "/somewhere/report.md", "source_bytes": 200_000_000,
    "bytes": 120_000_000, "ratio": 0.6,
}  # fmt: skip
MADE = Demo(Measured(" Paris.\n\nAnd", 20.0, 511), Measured(" Rome.", 21.0, 511), SUMMARY)


def run_directly(parameters: Parameters) -> dict[str, Any]:
    return run_pipeline(parameters).summary


def shown(*, terminal: bool) -> str:
    text = io.StringIO()
    show(MADE, Console(file=text, force_terminal=terminal, width=100))
    return text.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_quantizes_a_trained_model_that_still_knows_paris(
    tmp_path: Path, demo_model: Path, demo_text: DemoText
) -> None:
    made = demo(tmp_path, run_directly, nproc=2)
    assert made.before.answer.strip().startswith("Paris")
    assert made.after.answer.strip().startswith("Paris")
    assert made.before.tokens == made.after.tokens == 4088
    assert 0 < made.rise < 0.02  # with less text than the command's, the figure is noise
    assert 0.60 < made.summary["ratio"] < 0.61
    published = tmp_path / "smollm2-135m-fp8"
    assert made.summary["address"] == str(published)
    assert json.loads((published / "config.json").read_text())["quantization_config"]["format"] == "float-quantized"
    assert (published / "receipt.json").is_file() and (published / "tokenizer.json").is_file()


def test_a_pipe_gets_aligned_lines_without_colour_or_frames() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text and "│" not in text
    lines = text.splitlines()
    assert [line.split() for line in lines if line.startswith("weights")] == [
        ["weights", "200", "MB", "120", "MB", "(60.0%)"]
    ]
    assert any(line.startswith(f'"{PROMPT}"') and line.endswith("Rome.") and "Paris." in line for line in lines)
    assert any(line.endswith("21.000 (+5.00%)") for line in lines)
    assert lines[-2:] == ["checkpoint  /somewhere/smollm2-135m-fp8", "report      /somewhere/report.md"]


def test_a_terminal_gets_a_table() -> None:
    text = shown(terminal=True)
    assert "│" in text and "21.000 (+5.00%)" in text


def test_machines_get_numbers() -> None:
    made = as_json(MADE)
    assert made["perplexity_rise"] == pytest.approx(0.05)
    assert made["before"] == {"answer": " Paris.\n\nAnd", "perplexity": 20.0, "tokens": 511}
    assert json.loads(json.dumps(made)) == made


def test_a_model_that_cannot_be_asked_is_named_with_the_reason(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words. " * 2000)
    with pytest.raises(StageError, match=f"{tmp_path} could not be asked: .*"):
        measure(tmp_path, text, tokens=512)


def test_a_missing_package_is_told_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstration, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"gguf and compressed_tensors.*pip install 'nogather\[demo\]'"):
        demo(tmp_path, run_directly)
    assert not list(tmp_path.iterdir())
