"""The quantize task: recipe, source headers and statistics become a plan."""

from tasks.calibrate import calibrate_step
from tasks.run import Run
from tasks.stage import StageResult, run_step
from tasks.step import Step


def quantize_step(run: Run) -> Step:
    """What the plan is made from."""
    return Step(
        run,
        "quantize",
        inputs={"calibration": calibrate_step(run).as_input()},
        options={
            "max_shard_bytes": run.max_shard_bytes,
            "fail_on_unrouted_experts": run.fail_on_unrouted_experts,
        },
    )


def quantize(run: Run) -> StageResult:
    """Leave plan.json and plan.safetensors."""
    return run_step(quantize_step(run))
