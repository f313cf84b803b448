"""The quantize stage: recipe x source headers x statistics -> plan.json and plan.safetensors. Rank 0 works.

It decides and does not touch a weight: scales follow from absmax values, and every decision is in the plan with
its reason. Export needs nothing else.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from distribute.dialects.spec import Group, ShareGroups
from distribute.dialects.table import DIALECTS
from distribute.errors import DataError, SourceError, StageError
from distribute.job import Job, Progress, write_json
from distribute.numerics.fp8 import CODECS
from distribute.plan import Plan, make_plan
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from distribute.tensors import DTYPES


def run(job: Job, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Decide the plan. Called by all ranks; rank 0 writes the artifacts.

    Returns:
        figures: modules quantized and kept, bytes before and after, files.
    """
    figures: dict[str, Any] = {}
    with ranks.together("quantize"):
        if ranks.is_first:
            figures = _decide(job, progress)
    return figures


def _decide(job: Job, progress: Progress) -> dict[str, Any]:
    recipe = make_recipe(job.recipe)
    checkpoint = Checkpoint.open(job.source)
    plan = make_plan(checkpoint, recipe, job.options["max_shard_bytes"])
    statistics = Statistics.read(Path(job.inputs["calibration"]))
    progress.start("quantize", len(plan.quantized), "tensors")
    values, fallbacks = scale_values(plan, statistics)
    progress.advance(len(plan.quantized))
    if fallbacks and job.options["fail_on_unrouted_experts"]:
        raise DataError(
            f"{len(fallbacks)} expert layers saw no calibration token, for example {next(iter(fallbacks))}; "
            "give more or other calibration text, or run without fail-on-unrouted-experts"
        )
    folder = Path(job.folder)
    save_file(values, folder / "plan.safetensors")
    write_json(folder / "fallbacks.json", fallbacks)
    plan.write(folder / "plan.json")
    return {
        "modules_quantized": len(plan.quantized),
        "modules_kept": len(plan.decisions) - len(plan.quantized),
        "source_bytes": plan.source_bytes,
        "bytes": plan.nbytes,
        "files": len(plan.files),
        "experts_without_tokens": len(fallbacks),
        "warnings": list(
            dict.fromkeys([*statistics.report["warnings"], *plan.warnings])
        ),  # both looked at the source
    }


def scale_values(plan: Plan, statistics: Statistics) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every scale of the checkpoint by output name, in the dtype and shape of the plan; and the fallbacks taken.

    Raises:
        StageError: a linear layer was never run, so its inputs have no range.
        SourceError: a scale is not finite (the weight overflows the model's dtype).
    """
    scheme, dialect = plan.recipe.scheme, DIALECTS[plan.recipe.dialect]
    codec = CODECS[dialect.codec(scheme)]
    dtype = DTYPES[plan.model_dtype]
    groups = dialect.share_groups(plan.quantized, scheme)
    # Rounding is monotonic: the absmax of the cast weight is the cast absmax.
    rows = {m: statistics.weight_absmax[f"{m}.weight"].to(dtype).float() for m in plan.quantized}
    _share_rows(rows, groups.weight)
    values = {f"{m}.weight_scale": codec.weight_scale(rows[m], dtype) for m in plan.quantized}
    fallbacks: dict[str, str] = {}
    if scheme.needs_data:
        inputs, fallbacks = share_inputs(plan.quantized, statistics.input_absmax, groups)
        values |= {f"{m}.input_scale": codec.input_scale(inputs[m], dtype) for m in plan.quantized}
    bad = [name for name, value in values.items() if not bool((torch.isfinite(value) & (value > 0)).all())]
    if bad:
        raise SourceError(f"{bad[0]} is not a positive finite number: the weight overflows {plan.model_dtype}")
    return {name: value.contiguous().clone() for name, value in values.items()}, fallbacks


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
            if module not in seen:
                fallbacks[module] = f"saw no token; takes the largest input of {len(live)} siblings"
            if module not in seen or group in groups.input:
                inputs[module] = shared
    missing = [module for module in modules if module not in inputs]
    if missing:
        raise StageError(
            f"{len(missing)} quantized layers saw no input during calibration, for example {missing[0]}; "
            "give more or other calibration text, or ignore these layers in the recipe"
        )
    return inputs, fallbacks


def _share_rows(rows: dict[str, torch.Tensor], groups: Iterable[Group]) -> None:
    """In place: members of a group get the group's largest absmax in every row (per tensor scales only)."""
    for group in groups:
        largest = torch.stack([rows[module].max() for module in group]).max()
        for module in group:
            rows[module] = largest.expand(len(rows[module]))
