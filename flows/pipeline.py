"""The order of the stages, once, for Prefect and for scripts.

How a stage is called is a parameter: `call_directly` runs it as a plain function, the flow runs it as a task.
Everything that can fail early is asked first; no rank starts before the target, the recipe, the source, the
data and the disk have been looked at. Never imports torch or Prefect.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distribute.errors import RecipeError
from distribute.job import read_json
from distribute.recipe import Recipe
from distribute.sizes import parse_size
from flows.parameters import Parameters
from infra.launch import default_nproc
from infra.settings import load_settings
from tasks.calibrate import calibrate
from tasks.export import export
from tasks.fetch import fetch_data, fetch_source, open_folder
from tasks.preflight import check_run, check_workspace
from tasks.quantize import quantize
from tasks.report import Report, report
from tasks.run import Calibration, Run, new_run_id
from tasks.sensitivity import Chosen, choose_presets, sensitivity
from tasks.stage import StageResult
from tasks.upload import check_target, upload, upload_folder
from tasks.verify import verify, verify_folder

Call = Callable[..., Any]

STAGES = (calibrate, quantize, export, verify)


def call_directly(function: Callable[..., Any], *args: Any) -> Any:
    """Run a stage function as it is."""
    return function(*args)


def run_pipeline(parameters: Parameters, call: Call = call_directly) -> Report:
    """Measure where presets are to be chosen; calibrate, quantize, export, verify, upload, report.

    Raises:
        UserError: something has to be changed by the user; mostly before any rank has started.
        StageError: a stage failed for another reason. What was finished is kept and reused by the next run.
    """
    run = prepare(parameters, call)
    stages: list[StageResult] = []
    if run.recipe.auto:
        stages.append(call(sensitivity, run))
        run = choose_presets(run, stages[0]).run
    stages += [call(stage, run) for stage in STAGES]
    receipt = call(upload, run) if run.target else None
    return call(report, run, stages, receipt)


def measure_sensitivity(parameters: Parameters, call: Call = call_directly) -> Chosen:
    """What each preset loses in each group of layers, and the recipe that the budget chooses; nothing is quantized.

    Raises:
        RecipeError: the recipe has no budget, or one that cannot be met. Else as `run_pipeline`.
    """
    if parameters.load_recipe().auto is None:
        raise RecipeError(
            f"recipe {parameters.recipe} leaves nothing to choose; give a budget: --bits 5.0, or in a recipe file "
            "auto: {bits: 5.0, presets: [nvfp4, fp8]}"
        )
    run = prepare(parameters, call)
    return choose_presets(run, call(sensitivity, run))


def prepare(parameters: Parameters, call: Call = call_directly) -> Run:
    """Fetch what is needed and check everything that can be checked without ranks."""
    settings = load_settings()
    recipe = parameters.load_recipe()
    workspace = call(check_workspace, parameters.workspace_folder())
    if parameters.target:
        call(check_target, parameters.target, parameters.overwrite)
    # Text is small: it is looked at before a large model is fetched.
    needs_data = recipe.needs_data and parameters.calib
    data = call(fetch_data, parameters.calib, workspace) if needs_data else None
    run = Run(
        run_id=new_run_id(),
        workspace=workspace,
        source=call(fetch_source, parameters.model, workspace),
        recipe=recipe,
        data=data,
        calibration=Calibration(
            samples=parameters.samples,
            sequence_length=parameters.sequence_length,
            batch_size=parameters.batch_size,
            seed=parameters.seed,
        ),
        max_shard_bytes=parse_size(parameters.max_shard_size),
        target=parameters.target or None,
        overwrite=parameters.overwrite,
        nproc=parameters.nproc or settings.nproc or default_nproc(),
        fail_on_unrouted_experts=parameters.fail_on_unrouted_experts,
        trust_remote_code=parameters.trust_remote_code,
    )
    call(check_run, run)
    return run


def verify_checkpoint(folder: str, *, workspace: str = "", call: Call = call_directly) -> dict[str, Any]:
    """Check a written checkpoint on its own and return verify.json.

    Raises:
        SourceError: the folder holds no checkpoint. VerifyError: it is not sound.
    """
    stage = call(verify_folder, _prepare_folder(folder, workspace, call))
    return read_json(stage.folder / "verify.json")


def publish_checkpoint(
    folder: str, target: str, *, overwrite: bool = False, workspace: str = "", call: Call = call_directly
) -> dict[str, Any]:
    """Check a written checkpoint, publish it and return the receipt.

    Raises:
        SourceError, VerifyError: see `verify_checkpoint`. TargetError: the target cannot be used.
    """
    call(check_target, target, overwrite)
    run = replace(_prepare_folder(folder, workspace, call), target=target, overwrite=overwrite)
    return call(upload_folder, run, call(verify_folder, run))


def _prepare_folder(folder: str, workspace: str, call: Call) -> Run:
    place = call(check_workspace, Path(workspace) if workspace else load_settings().workspace)
    # One rank: these checks read headers and scales only, except for one sha256 a file.
    return Run(new_run_id(), workspace=place, source=open_folder(folder), recipe=Recipe(), nproc=1)
