"""The quantize task: recipe, source headers and statistics become a plan."""

from dataclasses import asdict

from tasks.calibrate import calibrate_step
from tasks.run import Run
from tasks.stage import StageResult, run_step
from tasks.step import Step


def quantize_step(run: Run) -> Step:
    """What the plan is made from; the calibration text too, where an algorithm runs it through the model again."""
    solves = run.recipe.solves
    return Step(
        run,
        "quantize",
        inputs={"calibration": calibrate_step(run).as_input()},
        options={
            "max_shard_bytes": run.max_shard_bytes,
            "fail_on_unrouted_experts": run.fail_on_unrouted_experts,
            **(asdict(run.calibration) if solves else {}),
        },
        data=run.data if solves else None,
    )


def quantize(run: Run) -> StageResult:
    """Leave plan.json and plan.safetensors; and parameters, one file a decoder layer, where an algorithm ran."""
    step = quantize_step(run)
    paths = {"data": str(run.data.path)} if run.data and step.data else {}
    return run_step(step, job_options={**paths, "trust_remote_code": run.trust_remote_code})
