"""The calibrate task: ranges of weights and, where the recipe needs them, of inputs."""

from dataclasses import asdict

from distribute.errors import DataError
from tasks.run import Run
from tasks.stage import StageResult, run_step
from tasks.step import Step


def calibrate_step(run: Run) -> Step:
    """What calibration is made from. A recipe without static inputs needs no text, so its amount is no option.

    Raises:
        DataError: the recipe needs calibration text and there is none.
    """
    if run.recipe.needs_data and run.data is None:
        raise DataError(
            f"recipe {run.recipe.preset} measures inputs and needs text: give --calib FILE "
            "(.txt, .jsonl, .parquet or hf://datasets/org/name), or use a recipe with dynamic inputs like fp8_dynamic"
        )
    if not run.recipe.observes:
        return Step(run, "calibrate")
    return Step(run, "calibrate", options=asdict(run.calibration), data=run.data)


def calibrate(run: Run) -> StageResult:
    """Leave calibration.safetensors and calibration.json."""
    step = calibrate_step(run)
    paths = {"data": str(run.data.path)} if run.data and step.data else {}
    return run_step(step, job_options={**paths, "trust_remote_code": run.trust_remote_code})
