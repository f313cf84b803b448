"""The sensitivity stage: what each preset would do to the outputs of each group of layers. Measured, not guessed.

Layer by layer of the source, in two passes over its batches: the first sums H = X^T X and ranges, the second
D = dX^T dX of what coding does to the inputs. A weight W coded as C costs trace((C - W) H (C - W)^T) +
trace(C D C^T) of trace(W H W^T): noise of weights and inputs, as if they did not know of each other. The error of
a group is the sum over its projections; experts of a layer are one projection, so each counts by what it is given.
Codes are the nearest ones: what an algorithm (AWQ, GPTQ) may win comes on top.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distribute.allocation import Choice, Group
from distribute.auto import Candidate, Inquiry, Question, Table, inquire
from distribute.calibrate import samples_of
from distribute.coded import Subject
from distribute.dataset import batches
from distribute.dialects.table import DIALECTS
from distribute.folds import Fold, input_groups
from distribute.inputs import watching
from distribute.job import Job, Progress
from distribute.layers import KEEP
from distribute.layerwise import LayerwiseModel, Part, computing
from distribute.linear import Linear
from distribute.moments import InputMoments, Moments
from distribute.numerics.inputs import coded_inputs
from distribute.numerics.moments import output_error
from distribute.numerics.table import find_codec
from distribute.part_solver import passes
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.scheme import Quantizer
from distribute.source import Checkpoint
from distribute.spill import Spill
from distribute.tensors import DTYPES

HIDDEN = "hidden"
MOMENTS_BYTES = 8 << 30  # of inputs that are watched at a time, a rank
ACTIVATION_BYTES = 8 << 30  # hidden states in memory, a rank; the others go to the workspace

#: Squared error and size of a module's outputs, by preset and module.
Errors = dict[str, dict[str, tuple[float, float]]]


def run(job: Job, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Measure. Called by all ranks; rank 0 writes sensitivity.json.

    Returns:
        figures: how much was measured, groups and presets.
    """
    with ranks.together("open"):
        checkpoint = Checkpoint.open(job.source)
        checkpoint.refuse_quantized()
        inquiry = inquire(checkpoint, make_recipe(job.recipe))
        samples = samples_of(job)
    errors = _measure(job, inquiry, checkpoint, samples.tokens, ranks, progress)
    with ranks.together("write"):
        if ranks.is_first:
            _table(inquiry, errors).write(Path(job.folder))
    return samples.report | {
        "groups": len(inquiry.questions),
        "presets": list(inquiry.recipe.candidates),
        "warnings": [*checkpoint.warnings, *samples.report["warnings"]],
    }


def _measure(
    job: Job,
    inquiry: Inquiry,
    checkpoint: Checkpoint,
    tokens: Sequence[Tensor],
    ranks: Ranks,
    progress: Progress,
) -> Errors:
    some = {name: scheme for q in inquiry.questions for c in q.candidates for name, scheme in c.schemes.items()}
    subject = Subject(
        checkpoint=checkpoint,
        schemes=some,
        dialect=inquiry.recipe.dialect,
        folds=(),
        dtype=DTYPES[inquiry.model_dtype],
        device=ranks.device,
    )
    threads, errors = job.options["threads"], defaultdict[str, dict[str, tuple[float, float]]](dict)
    with ranks.together("open"):
        model = LayerwiseModel.open(
            checkpoint,
            device=ranks.device,
            trust_remote_code=job.options["trust_remote_code"],
            threads=threads,
        )
        model.check(set(some))
    own = batches(tokens, job.options["batch_size"])[ranks.rank :: ranks.world]
    states = Spill(Path(job.folder) / HIDDEN / str(ranks.rank), ACTIVATION_BYTES, ranks.device)
    progress.start("measuring", sum(batch.numel() for batch in own) * model.num_parts, "token layers")
    with ranks.together("measure"), computing(threads):
        for part in model.parts(own, states):
            measure = PartMeasure(subject, part, inquiry.questions, ranks)
            for preset, of in measure.errors(progress).items():
                errors[preset] |= of
    states.close()
    return errors


@dataclass
class PartMeasure:
    """Measures the layers of one part. Called by all ranks."""

    subject: Subject
    part: Part
    questions: Sequence[Question]
    ranks: Ranks

    def errors(self, progress: Progress) -> Errors:
        """Of every candidate of the part's modules; those that no token reached have none."""
        linears = self.subject.linears_of(self.part)
        own = [question for question in self.questions if question.names[0] in linears]
        quantizers = dict.fromkeys(_inputs_of(own))
        found = defaultdict[str, dict[str, tuple[float, float]]](dict)
        units = [Fold(group, "kept") for group in input_groups(linears)]
        limit = MOMENTS_BYTES // (1 + len(quantizers))
        groups = list(passes(units, linears, limit))
        for number, group in enumerate(groups):
            last = number == len(groups) - 1
            watched = [module for fold in group for module in fold.consumers]
            moments, noises = self._watch(watched, quantizers, progress if last else None, advance=last)
            seen = {module: replace(linears[module], moments=moments.get(module)) for module in watched}
            for preset, of in self._compare(own, seen, linears, noises).items():
                found[preset] |= of
        if not groups:
            self.part.run(progress)
        return found

    def _watch(
        self, modules: Sequence[str], quantizers: Iterable[Quantizer], progress: Progress | None, *, advance: bool
    ) -> tuple[dict[str, Moments], dict[Quantizer, dict[str, Moments]]]:
        """Moments of inputs, and of what each way to code them changes; by module."""
        wanted = set(modules)
        projections = [projection for projection in self.part.projections if projection.module in wanted]
        inputs = InputMoments(second=True)
        quantizers = list(quantizers)
        with watching(self.part.model, projections, inputs):
            self.part.run(None if quantizers else progress, advance=advance and not quantizers)
        moments, _ = inputs.reduced(self.ranks, self.subject.device)
        if not quantizers:
            return moments, {}
        absmax = {module: found.absmax.amax() for module, found in moments.items()}
        noises = InputNoises(quantizers, self.subject.dialect, absmax)
        with watching(self.part.model, projections, noises):
            self.part.run(progress, advance=advance)
        return moments, noises.reduced(self.ranks, self.subject.device)

    def _compare(
        self,
        questions: Iterable[Question],
        seen: Mapping[str, Linear],
        linears: Mapping[str, Linear],
        noises: Mapping[Quantizer, Mapping[str, Moments]],
    ) -> Errors:
        """Each rank takes its share of the modules; all get everything."""
        own = list(seen)[self.ranks.rank :: self.ranks.world]
        record = [
            (preset, module, *_error(linear, noises))
            for question in questions
            for preset, linear_of in self._coded(question, linears)
            for module, linear in linear_of.items()
            if module in own and seen[module].moments is not None
            for linear in (replace(linear, moments=seen[module].moments),)
        ]
        found = defaultdict[str, dict[str, tuple[float, float]]](dict)
        for rows in self.ranks.control.exchange("sensitivity", record).values():
            for preset, module, noise, size in rows:
                found[preset][module] = (noise, size)
        return found

    def _coded(self, question: Question, linears: Mapping[str, Linear]) -> Iterator[tuple[str, dict[str, Linear]]]:
        """The layers of a group as each candidate codes them; absmax shared as its dialect shares it."""
        codec = DIALECTS[self.subject.dialect].codec
        for candidate in question.candidates:
            if candidate.schemes:
                coded = {
                    module: replace(linears[module], scheme=scheme, codec=find_codec(codec(scheme)))
                    for module, scheme in candidate.schemes.items()
                }
                subject = replace(self.subject, schemes=candidate.schemes)
                yield candidate.preset, subject.with_parameters(coded, {})


class InputNoises:
    """Moments of what coding does to inputs, for every way to code them. One rank's own; an `inputs.Observer`."""

    def __init__(self, quantizers: Iterable[Quantizer], dialect: str, absmax: Mapping[str, Tensor]):
        self._moments = {quantizer: InputMoments(second=True) for quantizer in quantizers}
        self._dialect = dialect
        self._absmax = absmax
        self._last: tuple[Tensor, dict[Quantizer, Tensor]] | None = None

    def see(self, names: tuple[str, ...], x: Tensor) -> None:
        """`x` [..., in] is an input of every layer in `names`."""
        if x.numel() == 0 or not names:
            return
        if self._last is None or self._last[0] is not x:
            self._last = (x, {one: self._noise(one, x, self._absmax[names[0]]) for one in self._moments})
        for quantizer, noise in self._last[1].items():
            self._moments[quantizer].see(names, noise)

    def count(self, names: tuple[str, ...], rows: int) -> None:
        """Nothing: the first pass counted."""

    def reduced(self, ranks: Ranks, device: torch.device) -> dict[Quantizer, dict[str, Moments]]:
        """Moments of all ranks' noises. Called by all ranks."""
        self._last = None
        return {quantizer: moments.reduced(ranks, device)[0] for quantizer, moments in self._moments.items()}

    def _noise(self, quantizer: Quantizer, x: Tensor, absmax: Tensor) -> Tensor:
        coded = coded_inputs(
            x,
            absmax,
            form=quantizer.format,
            granularity=quantizer.granularity,
            group_size=quantizer.group_size,
            dialect=self._dialect,
        )
        return coded - x.to(torch.float32)


def _inputs_of(questions: Iterable[Question]) -> Iterator[Quantizer]:
    schemes = (scheme for question in questions for c in question.candidates for scheme in c.schemes.values())
    return (scheme.inputs for scheme in schemes if scheme.inputs is not None)


def _error(linear: Linear, noises: Mapping[Quantizer, Mapping[str, Moments]]) -> tuple[float, float]:
    """Squared error of a layer's outputs, and their size."""
    assert linear.moments is not None and linear.moments.second is not None
    weight, coded = linear.weight.to(torch.float32), linear.coded()
    noise = output_error(coded - weight, linear.moments.second)
    if linear.scheme.inputs is not None:
        of_inputs = noises[linear.scheme.inputs][linear.module].second
        assert of_inputs is not None
        noise += output_error(coded, of_inputs)
    return float(noise.clamp(min=0)), float(output_error(weight, linear.moments.second).clamp(min=0))


def _table(inquiry: Inquiry, measured: Errors) -> Table:
    size = inquiry.recipe.group_size
    groups = tuple(_group(question, measured) for question in inquiry.questions)
    return Table(size if isinstance(size, int) else None, groups)


def _group(question: Question, measured: Errors) -> Group:
    choices = [
        Choice(candidate.preset, candidate.bits, _group_error(candidate, measured.get(candidate.preset, {})))
        for candidate in question.candidates
    ]
    return Group(question.names, question.weights, tuple(choices))


def _group_error(candidate: Candidate, measured: Mapping[str, tuple[float, float]]) -> float:
    """Sum over projections of noise by size; 0 for what stays as it is, and where no token came."""
    if candidate.preset == KEEP:
        return 0.0
    noises, sizes = defaultdict[str, float](float), defaultdict[str, float](float)
    for module in candidate.schemes:
        noise, size = measured.get(module, (0.0, 0.0))
        leaf = module.rpartition(".")[2]
        noises[leaf] += noise
        sizes[leaf] += size
    return sum(noises[leaf] / sizes[leaf] for leaf in noises if sizes[leaf] > 0)
