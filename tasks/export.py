"""The export task: every rank encodes its rows into the final files."""

from tasks.quantize import quantize_step
from tasks.run import Run
from tasks.stage import StageResult, run_step
from tasks.step import Step

#: Where the finished checkpoint lies in the stage's folder.
CHECKPOINT = "checkpoint"


def export_step(run: Run) -> Step:
    """What the checkpoint is made from."""
    return Step(run, "export", inputs={"plan": quantize_step(run).as_input()})


def export(run: Run) -> StageResult:
    """Leave checkpoint/ and files.json."""
    return run_step(export_step(run))
