"""`nogather demo`: a real trained model is asked and measured, quantized, published to a folder, and asked again.

Owns what is compared and how it is shown; the model and the text come from `tasks.demo_model`, the answers from a
subprocess, because they need torch. The checkpoint is in the compressed-tensors dialect, which transformers runs.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distribute.errors import StageError, UserError
from distribute.sizes import format_size
from flows.parameters import Parameters, make_parameters
from flows.tables import align
from tasks.demo_model import make_demo_model, make_demo_text

log = logging.getLogger(__name__)

PROMPT = "The capital of France is"
NEW_TOKENS = 4
HELDOUT_TOKENS = 4096
SAMPLES = 64
RECIPE, DIALECT = "fp8", "compressed-tensors"


@dataclass(frozen=True)
class Measured:
    """What a checkpoint says and how well it predicts."""

    answer: str
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class Demo:
    """The source and the quantized model, measured alike, and the summary of the run between."""

    before: Measured
    after: Measured
    summary: dict[str, Any]

    @property
    def rise(self) -> float:
        """By how much the perplexity rose: 0.01 is one percent."""
        return self.after.perplexity / self.before.perplexity - 1


def demo(
    folder: Path,
    run: Callable[[Parameters], dict[str, Any]],
    *,
    nproc: int | None = None,
    samples: int = SAMPLES,
    tokens: int = HELDOUT_TOKENS,
) -> Demo:
    """Everything of the demo, with stages in `<folder>/workspace` and the result in `<folder>/smollm2-135m-fp8`.

    Args:
        folder: made if missing.
        run: runs the pipeline and returns its summary: the Prefect flow, or the stages directly.
        nproc: ranks; None is one for each accelerator, else one for each core, at most two.
        samples: calibration samples of 512 tokens.
        tokens: how much held-out text is predicted.

    Raises:
        UserError: a package of the extra `demo` is missing, or the folder cannot be used.
        StageError: a download or a stage failed.
    """
    _check_packages()
    model = make_demo_model()
    text = make_demo_text()
    parameters = make_parameters(
        model=str(model),
        recipe=RECIPE,
        dialect=DIALECT,
        calib=str(text.calibration),
        samples=samples,
        nproc=nproc,
        target=str(folder / "smollm2-135m-fp8"),
        workspace=str(folder / "workspace"),
    )
    before = measure(model, text.heldout, tokens=tokens)
    summary = run(parameters)
    after = measure(Path(summary["address"]), text.heldout, tokens=tokens)
    return Demo(before, after, summary)


def measure(model: Path, heldout: Path, *, tokens: int) -> Measured:
    """Ask a checkpoint in a process of its own, with transformers.

    Raises:
        StageError: it cannot be asked.
    """
    log.info("asking %s", model)
    options = ["--prompt", PROMPT, "--heldout", str(heldout)]
    numbers = ["--tokens", str(tokens), "--new-tokens", str(NEW_TOKENS)]
    asked = subprocess.run(
        [sys.executable, "-P", "-m", "distribute.ask", str(model), *options, *numbers],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise StageError(f"{model} could not be asked: {reason.removeprefix('error: ')}")
    said = json.loads(asked.stdout)
    return Measured(said["answer"], said["perplexity"], said["tokens"])


def show(made: Demo, console: Console) -> None:
    """Print the comparison: a table on a terminal, aligned text in a pipe."""
    header = ("", "bf16 source", RECIPE)
    if console.is_terminal:
        table = Table(*header, title="SmolLM2-135M-Instruct, before and after", title_justify="left")
        for row in _rows(made):
            table.add_row(*row)
        console.print(table)
    else:
        console.print(align(header, _rows(made)), soft_wrap=True, highlight=False, markup=False)
    places = [(name, made.summary[key]) for name, key in (("checkpoint", "address"), ("report", "report"))]
    for name, place in places:
        console.print(f"{name:<12}{place}", soft_wrap=True, highlight=False, markup=False)


def as_json(made: Demo) -> dict[str, Any]:
    """The comparison for machines."""
    return {
        "prompt": PROMPT,
        "before": vars(made.before),
        "after": vars(made.after),
        "perplexity_rise": made.rise,
        "run": made.summary,
    }


def _rows(made: Demo) -> list[tuple[str, str, str]]:
    before, after, summary = made.before, made.after, made.summary
    return [
        (
            "weights",
            format_size(summary["source_bytes"]),
            f"{format_size(summary['bytes'])} ({summary['ratio']:.1%})",
        ),
        (f'"{PROMPT}"', _first_line(before.answer), _first_line(after.answer)),
        (
            f"perplexity, {before.tokens} tokens",
            f"{before.perplexity:.3f}",
            f"{after.perplexity:.3f} ({made.rise:+.2%})",
        ),
    ]


def _first_line(answer: str) -> str:
    return (answer.strip().splitlines() or ["(nothing)"])[0]


def _check_packages() -> None:
    missing = [name for name in ("gguf", "compressed_tensors") if find_spec(name) is None]
    if missing:
        raise UserError(f"the demo needs {' and '.join(missing)}; install them with: pip install 'nogather[demo]'")
