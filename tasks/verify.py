"""The verify task: what export wrote, read again and compared with plan and source."""

from tasks.export import export_step
from tasks.quantize import quantize_step
from tasks.run import Run
from tasks.stage import StageResult, run_step
from tasks.step import Step


def verify_step(run: Run) -> Step:
    """What the verdict is made from."""
    return Step(
        run,
        "verify",
        inputs={"plan": quantize_step(run).as_input(), "checkpoint": export_step(run).as_input()},
    )


def verify(run: Run) -> StageResult:
    """Leave verify.json.

    Raises:
        VerifyError: the checkpoint is not what the plan says; verify.json names every fault.
    """
    return run_step(verify_step(run))


def verify_folder(run: Run) -> StageResult:
    """Check a folder on its own: `run.source` is the checkpoint itself, and there is neither plan nor original.

    Never reused: whoever asks wants the files read now.
    """
    return run_step(Step(run, "verify", is_fresh=True))
