"""The calibrate stage: measures weights and, where the recipe needs it, the inputs of every quantized layer.

Weights are scanned first: a damaged source stops the run before anything expensive. Then the calibration text is
run layer by layer, its batches shared among ranks. A batch is the unit of sharing and its arithmetic does not
depend on the rank that runs it, so the statistics are equal bit for bit whatever the world size.
"""

import time
from pathlib import Path
from typing import Any

from distribute.dataset import Samples, batches, read_samples
from distribute.errors import SourceError
from distribute.job import Job, Progress
from distribute.layers import QUANTIZE, decide, matrix_of
from distribute.layerwise import LayerwiseModel
from distribute.modules import Modules
from distribute.observe import Observation, merge_ranks, observe
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.scan import scan
from distribute.source import Checkpoint
from distribute.statistics import Statistics


def run(job: Job, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Measure. Called by all ranks; rank 0 writes calibration.safetensors and calibration.json.

    Returns:
        figures: samples, tokens, and the warnings that belong in the report.
    """
    recipe = make_recipe(job.recipe)
    folder = Path(job.folder)
    samples: Samples | None = None
    with ranks.together("open"):
        checkpoint = Checkpoint.open(job.source)
        checkpoint.refuse_quantized()
        decisions = decide(checkpoint, recipe)
        checkpoint.tied_copies()
        quantized = [module for module, decision in decisions.items() if decision.action == QUANTIZE]
        schemes = {module: recipe.scheme_of(decisions[module].preset) for module in quantized}
        # What an algorithm decides it also measures, in the quantize stage.
        observed = [m for m, scheme in schemes.items() if scheme.static_inputs and not scheme.is_solved]
        if observed or recipe.kv_cache:
            samples = samples_of(job)
        matrices = {module: matrix_of(module, checkpoint.tensors) for module in quantized}
    weight_absmax = scan(checkpoint, matrices, ranks, workspace=folder, progress=progress)
    report: dict[str, Any] = {"samples": 0, "tokens": 0}
    warnings: list[str] = list(checkpoint.warnings)
    observation: Observation | None = None
    seconds = 0.0
    if samples is not None:
        observation, model, seconds = _observe(
            job, checkpoint, samples, observed, ranks, progress, kv=recipe.kv_cache is not None
        )
        report |= samples.report | {"layerwise": model.layerwise}
        warnings += [*samples.report["warnings"], *model.warnings]
    else:
        with ranks.together("structure"):
            if ranks.is_first:
                warnings += check_structure(checkpoint, quantized, job.options["trust_remote_code"])
    with ranks.together("write"):
        if ranks.is_first:
            if observation is not None:
                report |= {"tokens_per_expert": observation.tokens_per_expert}
                warnings += dead_experts(observation.tokens_per_expert)
            report |= {"warnings": warnings}
            found = observation or Observation()
            Statistics(weight_absmax, found.input_absmax, report, kv_absmax=found.kv_absmax).write(folder)
    counts = {"samples": report["samples"], "tokens": report["tokens"]}
    return counts | {"observe_seconds": seconds, "warnings": warnings}


def check_structure(checkpoint: Checkpoint, quantized: list[str], trust_remote_code: bool) -> list[str]:
    """Compare names with the model that transformers would build, without its weights; returns warnings. Rank 0.

    Raises:
        SourceError: something that should be quantized is no linear layer there.
    """
    try:
        modules = Modules(checkpoint, device="meta", trust_remote_code=trust_remote_code)
    except SourceError as error:
        return [f"what is a linear layer was decided by names alone: {error}"]
    foreign = sorted(set(quantized) - {projection.module for projection in modules.projections})
    if foreign:
        raise SourceError(
            f"{len(foreign)} modules look like linear layers by name but are none in this model, "
            f"for example {', '.join(foreign[:5])}; add them to the recipe's ignore list"
        )
    return []


def dead_experts(tokens_per_expert: dict[str, list[int]]) -> list[str]:
    """One warning that lists the experts no token reached; none when there are none."""
    dead = {block: [i for i, n in enumerate(tokens) if n == 0] for block, tokens in tokens_per_expert.items()}
    lines = [f"{block}: {', '.join(map(str, experts))}" for block, experts in dead.items() if experts]
    if not lines:
        return []
    return [f"experts that no calibration token reached take the input range of their siblings: {'; '.join(lines)}"]


def samples_of(job: Job) -> Samples:
    """The calibration text of a job, as token ids."""
    options = job.options
    return read_samples(
        Path(options["data"]),
        model=Path(job.source),
        samples=options["samples"],
        sequence_length=options["sequence_length"],
        seed=options["seed"],
        trust_remote_code=options["trust_remote_code"],
    )


def _observe(
    job: Job,
    checkpoint: Checkpoint,
    samples: Samples,
    quantized: list[str],
    ranks: Ranks,
    progress: Progress,
    *,
    kv: bool,
) -> tuple[Observation | None, LayerwiseModel, float]:
    """The merged observation on rank 0 (None elsewhere), the model that was run, and the seconds it ran."""
    own = batches(samples.tokens, job.options["batch_size"])[ranks.rank :: ranks.world]
    with ranks.together("calibrate"):
        model = LayerwiseModel.open(
            checkpoint,
            device=ranks.device,
            trust_remote_code=job.options["trust_remote_code"],
            threads=job.options["threads"],
        )
    started = time.monotonic()
    with ranks.together("calibrate"):
        observation = observe(model, own, quantized, progress, kv=kv)
    merged = merge_ranks(observation, quantized, ranks=ranks, workspace_path=Path(job.folder))
    return merged, model, round(time.monotonic() - started, 3)
