"""The quantize stage: recipe x source headers x statistics -> plan.json and plan.safetensors.

It decides: scales follow from absmax values, and every decision is in the plan with its reason. Where the recipe has
an algorithm that needs more than ranges, all ranks run it first, layer by layer; its parameters lie beside the plan.
Export needs nothing else.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from distribute.calibrate import samples_of
from distribute.coded import Subject
from distribute.dataset import batches
from distribute.dialects.spec import Group, ShareGroups
from distribute.dialects.table import DIALECTS
from distribute.encode import FOLD, VALUES, StageTensors, parameter_names
from distribute.errors import DataError, SourceError, StageError
from distribute.job import Job, Progress, write_json
from distribute.layers import expert_of
from distribute.numerics.table import find_codec, input_values
from distribute.plan import VALUE, Plan, find_folds, make_plan
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.solve import solve
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from distribute.tensors import DTYPES, read_tensor


def run(job: Job, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Decide the plan. Called by all ranks: algorithms share their work; rank 0 writes the artifacts.

    Returns:
        figures: modules quantized and kept, bytes before and after, files.

    Raises:
        DataError: experts saw no token, and that was not to pass.
    """
    recipe = make_recipe(job.recipe)
    with ranks.together("plan"):
        checkpoint = Checkpoint.open(job.source)
        plan = make_plan(checkpoint, recipe, job.options["max_shard_bytes"])
    solved = _solve(job, plan, checkpoint, ranks, progress) if recipe.solves else {"layers": {}, "warnings": []}
    figures: dict[str, Any] = {}
    with ranks.together("quantize"):
        if ranks.is_first:
            figures = write_plan(job, plan, checkpoint, solved, progress)
    return figures


def _solve(job: Job, plan: Plan, checkpoint: Checkpoint, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Run the algorithms of the recipe over the calibration text; the report of `distribute.solve.solve`."""
    with ranks.together("open"):
        samples = samples_of(job)
    subject = Subject(
        checkpoint=checkpoint,
        schemes=plan.schemes,
        dialect=plan.recipe.dialect,
        folds=find_folds(checkpoint, plan.schemes, plan.recipe),
        dtype=DTYPES[plan.model_dtype],
        device=ranks.device,
    )
    return solve(
        subject,
        batches(samples.tokens, job.options["batch_size"]),
        ranks=ranks,
        folder=Path(job.folder),
        progress=progress,
        trust_remote_code=job.options["trust_remote_code"],
        threads=job.options["threads"],
    )


def write_plan(
    job: Job, plan: Plan, checkpoint: Checkpoint, solved: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Write what follows from statistics and from the parameters that `solved` reports. Called by rank 0.

    Returns:
        figures, as `run`.
    """
    statistics = Statistics.read(Path(job.inputs["calibration"]))
    folder = Path(job.folder)
    progress.start("quantize", len(plan.quantized), "tensors")
    parameters = StageTensors(folder, parameter_names(folder))
    values, fallbacks = scale_values(plan, statistics, parameters)
    values |= _smoothing_values(plan, parameters, checkpoint)
    fallbacks |= {
        module: "saw no token; coded without calibration"
        for layer in solved["layers"].values()
        for module in layer["unseen"]
        if module not in fallbacks
    }
    progress.advance(len(plan.quantized))
    if fallbacks and job.options["fail_on_unrouted_experts"]:
        raise DataError(
            f"{len(fallbacks)} expert layers saw no calibration token, for example {next(iter(fallbacks))}; "
            "give more or other calibration text, or run without fail-on-unrouted-experts"
        )
    save_file({name: value.contiguous().clone() for name, value in values.items()}, folder / VALUES)
    write_json(folder / "fallbacks.json", fallbacks)
    write_json(folder / "solved.json", solved["layers"])
    routed = dict(statistics.report.get("tokens_per_expert", {}))
    for layer in solved["layers"].values():
        routed |= {block: found["tokens"] for block, found in layer["coverage"].items()}
    write_json(folder / "coverage.json", routed)
    plan.write(folder / "plan.json")
    warnings = [*statistics.report["warnings"], *solved["warnings"], *plan.warnings]
    return {
        "modules_quantized": len(plan.quantized),
        "modules_kept": len(plan.decisions) - len(plan.quantized),
        "source_bytes": plan.source_bytes,
        "bytes": plan.nbytes,
        "files": len(plan.files),
        "experts_without_tokens": len(fallbacks),
        "warnings": list(dict.fromkeys(warnings)),  # the stages looked at the same source
    }


def scale_values(
    plan: Plan, statistics: Statistics, parameters: StageTensors
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every value of the checkpoint by output name, in the dtype and shape of the plan; and the fallbacks taken.

    What an algorithm decided (`parameters`) goes before what was measured. Names that the plan does not have are of
    the codecs alone.

    Raises:
        StageError: a linear layer was never run, so its inputs have no range.
        SourceError: a scale is not finite (the weight overflows the model's dtype).
    """
    groups = DIALECTS[plan.recipe.dialect].share_groups(plan.schemes)
    values = _weight_values(plan, statistics, parameters, groups)
    inputs, fallbacks = _input_values(plan, statistics, parameters, groups)
    values |= inputs | _kv_values(plan, statistics)
    bad = [name for name, value in values.items() if value.is_floating_point() and not _is_sound(name, value)]
    if bad:
        raise SourceError(f"{bad[0]} is not a positive finite number: the weight overflows {plan.model_dtype}")
    return {name: value.contiguous().clone() for name, value in values.items()}, fallbacks


def _is_sound(name: str, value: torch.Tensor) -> bool:
    finite = bool(torch.isfinite(value).all())
    return finite and (not name.endswith("_scale") or bool((value > 0).all()))


def _weight_values(
    plan: Plan, statistics: Statistics, parameters: StageTensors, groups: ShareGroups
) -> dict[str, torch.Tensor]:
    dtype, dialect = DTYPES[plan.model_dtype], DIALECTS[plan.recipe.dialect]
    decided = {module: parameters.find(f"{module}.absmax") for module in plan.quantized}
    # Rounding is monotonic: the absmax of the cast weight is the cast absmax.
    absmax = {
        module: statistics.weight_absmax[module].to(dtype).float() if value is None else value
        for module, value in decided.items()
    }
    absmax |= _shared(absmax, groups.weight)
    matrices = plan.matrices
    return {
        f"{module}.{suffix}": value
        for module, scheme in plan.schemes.items()
        for suffix, value in find_codec(dialect.codec(scheme))
        .weight_values(absmax[module], matrices[module].shape, dtype)
        .items()
    }


def _input_values(
    plan: Plan, statistics: Statistics, parameters: StageTensors, groups: ShareGroups
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    static = {module: scheme.inputs for module, scheme in plan.schemes.items() if scheme.static_inputs}
    decided = {module: parameters.find(f"{module}.input_absmax") for module in static}
    measured = statistics.input_absmax | {module: value for module, value in decided.items() if value is not None}
    inputs, fallbacks = share_inputs(static, measured, groups)
    values: dict[str, torch.Tensor] = {}
    for module, quantizer in static.items():
        assert quantizer is not None
        found = input_values(quantizer.format, plan.recipe.dialect, inputs[module], DTYPES[plan.model_dtype])
        values |= {f"{module}.{suffix}": value for suffix, value in found.items()}
    return values, fallbacks


def _kv_values(plan: Plan, statistics: Statistics) -> dict[str, torch.Tensor]:
    """Scales of the K/V cache, for FP8 and NVFP4 alike those of FP8."""
    if plan.recipe.kv_cache is None:
        return {}
    values = {}
    for module, (k, v) in statistics.kv_absmax.items():
        for spec in DIALECTS[plan.recipe.dialect].kv_tensors(plan.recipe.kv_cache, plan.model_dtype):
            found = input_values("fp8", plan.recipe.dialect, k if spec.of == "k" else v, DTYPES[plan.model_dtype])
            values[".".join(filter(None, (module, spec.module, spec.suffix)))] = found["input_scale"]
    return values


def _smoothing_values(plan: Plan, parameters: StageTensors, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Vectors that stay in the checkpoint, and tensors that may take one up: unchanged where nothing is smoothed."""
    values = {}
    for output in (output for output in plan.outputs if output.codec == VALUE):
        if output.name.endswith(".pre_quant_scale"):
            found = parameters.find(output.name)
            values[output.name] = torch.ones(output.shape, dtype=DTYPES[output.dtype]) if found is None else found
        elif output.source is not None:
            found = parameters.find(f"{FOLD}{output.name}")
            values[output.name] = read_tensor(checkpoint, output.source) if found is None else found
    return values


def share_inputs(
    modules: Iterable[str], measured: Mapping[str, torch.Tensor], groups: ShareGroups
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Input absmax of every module after sharing, and for each module that saw no token where its range came from."""
    seen = {module: measured[module] for module in modules if module in measured}
    inputs = dict(seen)
    fallbacks: dict[str, str] = {}
    for group in (*groups.input, *groups.input_fallback):
        live = [seen[m] for m in group if m in seen]
        if not live:
            continue
        shared = torch.stack(live).max()
        for module in group:
            unrouted = module not in seen and expert_of(module) is not None
            if unrouted:
                fallbacks[module] = f"saw no token; takes the largest input of {len(live)} siblings"
            if unrouted or (module in seen and group in groups.input):
                inputs[module] = shared
    missing = [module for module in modules if module not in inputs]
    if missing:
        raise StageError(
            f"{len(missing)} quantized layers saw no input during calibration, for example {missing[0]}; "
            "give more or other calibration text, or ignore these layers in the recipe"
        )
    return inputs, fallbacks


def _shared(absmax: Mapping[str, torch.Tensor], groups: Iterable[Group]) -> dict[str, torch.Tensor]:
    """The largest absmax of its group for every member."""
    return {module: torch.stack([absmax[member] for member in group]).max() for group in groups for module in group}
