"""The command line as a user meets it: exit codes, one line of error, and what is imported."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distribute.errors import RankError
from flows.cli import app
from flows.parameters import Parameters

RUNNER = CliRunner()


def nogather(*args: str) -> subprocess.CompletedProcess[str]:
    """The console script's entry point in a process of its own."""
    command = [sys.executable, "-c", "from flows.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["run", "/no/folder", "--recipe", "fp8_dynamic", "--direct"],
            "/no/folder is neither an existing folder",
        ),
        (["run", "MODEL", "--direct"], "recipe fp8 measures inputs and needs text: give --calib FILE"),
        (["run", "MODEL", "--recipe", "int3"], "recipe 'int3' is neither a preset nor a file; presets: fp8"),
        (["run", "MODEL", "--samples", "-1"], "samples -1: Input should be greater than or equal to 1"),
        (["run", "MODEL", "--max-shard-size", "lots"], "max-shard-size 'lots'"),
        (["plan", "MODEL", "--dialect", "gguf"], "dialect 'gguf'"),
        (["plan", "/no/folder"], "neither an existing folder nor a Hub model"),
        (["inspect", "/no/folder"], "is not a folder"),
        (["publish", "/no/folder", "--to", "ftp://host/x"], "target scheme 'ftp' is unknown"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(args: list[str], message: str, parameters: Parameters) -> None:
    workspace = ["--workspace", parameters.workspace] if args[0] in ("run", "plan", "publish") else []
    result = RUNNER.invoke(app, [arg.replace("MODEL", parameters.model) for arg in args] + workspace)
    assert result.exit_code == 2, result.output
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize("args", [["run"], ["run", "m", "--samples", "many"], ["quantise"], ["plan", "m", "--fast"]])
def test_a_usage_error_is_exit_code_2(args: list[str]) -> None:
    assert RUNNER.invoke(app, args).exit_code == 2


def test_with_json_an_error_is_an_object_on_stdout() -> None:
    result = RUNNER.invoke(app, ["inspect", "/no/folder", "--json"])
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["type"], error["exit_code"]) == ("SourceError", 2)


@pytest.mark.parametrize(
    ("error", "code"),
    [(RankError("export", {1: "boom"}), 1), (OSError(28, "No space left"), 1), (KeyboardInterrupt(), 130)],
)
def test_other_failures_have_their_own_exit_codes(
    error: BaseException, code: int, parameters: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Parameters) -> None:
        raise error

    monkeypatch.setattr("flows.pipeline.run_pipeline", fail)
    result = RUNNER.invoke(app, ["run", parameters.model, "--direct"])
    assert result.exit_code == code
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_bug_keeps_its_traceback(parameters: Parameters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.pipeline.run_pipeline", lambda _: 1 / 0)
    result = RUNNER.invoke(app, ["run", parameters.model, "--direct"])
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


def test_with_json_a_bug_is_an_object_on_stdout_and_still_raised(
    parameters: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.pipeline.run_pipeline", lambda _: 1 / 0)
    result = RUNNER.invoke(app, ["run", parameters.model, "--direct", "--json"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert json.loads(result.stdout)["error"] == {
        "type": "ZeroDivisionError",
        "message": "division by zero",
        "exit_code": 1,
    }


def test_plan_shows_every_tensor_file_and_kept_module(parameters: Parameters) -> None:
    result = RUNNER.invoke(app, ["plan", parameters.model, "--recipe", "fp8_dynamic"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    row = next(line for line in lines if line.startswith("model.layers.0.mlp.down_proj.weight "))
    assert row.split()[1:3] == ["F8_E4M3", "8x12"]
    assert row.split()[-2:] == ["model.safetensors", "96"]
    assert any(line.startswith("lm_head") and "output head" in line for line in lines)
    assert lines[-1].startswith("14 of 16 modules are quantized (fp8_dynamic, modelopt); ")


def test_plan_tells_how_the_work_spreads_over_ranks(parameters: Parameters) -> None:
    lines = RUNNER.invoke(app, ["plan", parameters.model, "--ranks", "3"]).stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("over 3 ranks"))
    assert [line.split()[0] for line in lines[start + 2 : start + 4]] == ["encode", "seal"]
    made = json.loads(RUNNER.invoke(app, ["plan", parameters.model, "--ranks", "3", "--json"]).stdout)
    encode = made["spread"]["encode"]
    assert encode["mean"] <= encode["busiest"] == pytest.approx(encode["mean"] * encode["ratio"])
    assert sum(entry["end"] - entry["begin"] for entry in made["tensors"]) == pytest.approx(3 * encode["mean"])


def test_plan_as_json_is_the_plan(parameters: Parameters) -> None:
    result = RUNNER.invoke(app, ["run", parameters.model, "--dry-run", "--json"])
    plan = json.loads(result.stdout)
    assert plan["bytes"] == sum(file["size"] for file in plan["files"])
    assert {"tensors", "decisions", "source_bytes"} <= plan.keys()


def test_inspect_tells_what_the_headers_say(parameters: Parameters) -> None:
    facts = json.loads(RUNNER.invoke(app, ["inspect", parameters.model, "--json"]).stdout)
    assert facts["model_type"] == "llama"
    assert facts["dtypes"] == {"BF16": {"tensors": facts["tensors"], "bytes": facts["bytes"]}}
    text = RUNNER.invoke(app, ["inspect", parameters.model]).stdout
    assert "model.safetensors" in text
    assert text.rstrip().endswith("not quantized")


def test_plan_imports_neither_torch_nor_prefect(parameters: Parameters) -> None:
    program = (
        "import sys\n"
        "from flows.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'prefect', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, "plan", parameters.model], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_the_flow_process_never_imports_torch() -> None:
    program = (
        "import sys\n"
        "import flows.cli, flows.quantize_model, flows.verify_model, flows.publish_model\n"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_the_direct_run_makes_what_verify_and_publish_take(parameters: Parameters, tmp_path: Path) -> None:
    common = ["--workspace", parameters.workspace]
    out, copy = tmp_path / "out", tmp_path / "copy"
    options = ["--recipe", "fp8_dynamic", "--nproc", "1", "--direct", "--json", "--to", str(out)]
    made = nogather("run", parameters.model, *options, *common)
    assert made.returncode == 0, made.stderr
    summary = json.loads(made.stdout)  # nothing else is on stdout
    assert summary["address"] == str(out)
    assert "calibrate: " in made.stderr
    (out / "assets").mkdir()
    (out / "assets" / "logo.txt").write_text("x")
    (out / ".env").write_text("HF_TOKEN=hf_secret")
    published = nogather("publish", str(out), "--to", str(copy), *common)
    assert published.returncode == 0, published.stderr
    assert (copy / "assets" / "logo.txt").exists() and not (copy / ".env").exists()
    assert published.stdout == f"published: {copy}\n"
    assert (copy / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-3])
    damaged = nogather("verify", str(copy), *common)
    assert damaged.returncode == 2, damaged.stderr
    assert "model.safetensors: truncated" in damaged.stderr.splitlines()[-1]


def test_a_prefect_server_that_does_not_answer_is_told_in_one_line(
    parameters: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    result = nogather("run", parameters.model, "--recipe", "fp8_dynamic", "--workspace", parameters.workspace)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: the Prefect server at http://127.0.0.1:9/api cannot be")
    assert "Traceback" not in result.stderr


def test_the_version_is_told() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"nogather {version('nogather')}\n")
