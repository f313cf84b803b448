"""One decoder layer solved: from its weights and the inputs of its linear layers to their parameters.

Owns the steps within a layer and their memory: as many moments as are allowed are watched at a time, in passes over
the batches. Layers whose smoothing a linear layer before them absorbs come first, since it changes that one's rows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

from torch import Tensor

from distribute.absorb import absorbed, check_outputs
from distribute.coded import Subject
from distribute.folds import KEEPING, Fold, input_groups
from distribute.inputs import watching
from distribute.job import Progress
from distribute.layers import expert_of
from distribute.layerwise import Part
from distribute.linear import Linear
from distribute.moments import InputMoments, Moments
from distribute.ranges import RANGING, input_range
from distribute.ranks import Ranks
from distribute.roundings import solve_roundings
from distribute.scheme import Algorithm
from distribute.smoothings import solve_smoothings, spread_smoothings
from distribute.tensors import read_tensor

#: Bytes of an element of moments while they are summed.
ELEMENT_BYTES = 8


@dataclass
class PartSolver:
    """Solves the layers of one part; called by all ranks. `linears`: all that are quantized there."""

    subject: Subject
    part: Part
    linears: Mapping[str, Linear]
    ranks: Ranks
    parameters: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=lambda: {"smoothing": {}, "errors": {}, "fallen": []})

    def solve(self, moments_bytes: int, progress: Progress, *, advance: bool) -> None:
        """Find `parameters` (names as stored) and fill the `report`. `advance`: hidden states move on with it."""
        modules = self.subject.solved_in(self.part)
        units, useful = self._units(modules)
        groups = list(passes(units, self.linears, moments_bytes))
        watched: dict[str, int] = {}
        for number, group in enumerate(groups):
            own = [module for fold in group for module in fold.consumers]
            last = number == len(groups) - 1
            moments, routed = self._watch(own, progress if last else None, advance=advance and last)
            watched |= routed
            self._smooth([fold for fold in group if fold in useful], own, moments)
            self._round(own, moments)
        self.report["coverage"] = coverage(modules, watched)
        self.report["unseen"] = [m for m in modules if watched.get(m, 0) == 0]

    def check(self, hidden: Tensor) -> None:
        """Raise StageError when absorbed smoothing changes what the part makes of `hidden`, the first batch's.

        In place: the part is smoothed then.
        """
        if any(fold.kind != "kept" for fold in self._own_folds) and self.part.path:
            before = self.part.output(0, hidden)
            self.part.change(self.subject.changes(self.linears, self.parameters, coded=False))
            check_outputs(self.part, hidden, before)

    @cached_property
    def _own_folds(self) -> list[Fold]:
        own = set(self.subject.solved_in(self.part))
        return [fold for fold in self.subject.folds if fold.consumers[0] in own]

    def _units(self, modules: Sequence[str]) -> tuple[list[Fold], set[Fold]]:
        """What is solved together: folds, those into linear layers first, and the rest by shared input.

        And those of the folds that are made: a vector that the checkpoint cannot hold is none.
        """
        own = sorted(self._own_folds, key=lambda fold: fold.kind != "linear")
        taken = {module for fold in own for module in fold.consumers}
        rest = input_groups([module for module in modules if module not in taken])
        return own + [Fold(group, "kept") for group in rest], {fold for fold in own if self._is_made(fold)}

    def _is_made(self, fold: Fold) -> bool:
        return fold.kind != "kept" or self.subject.dialect in KEEPING

    def _watch(
        self, modules: Sequence[str], progress: Progress | None, *, advance: bool
    ) -> tuple[dict[str, Moments], dict[str, int]]:
        algorithms = [self.subject.schemes[module].algorithm for module in modules]
        ranging = any(algorithm.name in RANGING for algorithm in algorithms)
        observer = InputMoments(second=any(map(needs_second, algorithms)), histograms=ranging)
        wanted = set(modules)
        projections = [projection for projection in self.part.projections if projection.module in wanted]
        everyone = any(algorithm.all_experts for algorithm in algorithms)
        with watching(self.part.model, projections, observer, all_experts=everyone):
            self.part.run(progress, advance=advance)
        return observer.reduced(self.ranks, self.subject.device)

    def _smooth(self, group: Sequence[Fold], modules: Sequence[str], moments: Mapping[str, Moments]) -> None:
        linears = {module: replace(self.linears[module], moments=moments.get(module)) for module in modules}
        chosen = solve_smoothings(group, linears, self.ranks)
        self.parameters |= spread_smoothings(group, chosen, linears, absorb=self._absorb)
        smoothed = {module for fold in group for module in fold.consumers}
        for module in moments.keys() - smoothed:
            if linears[module].scheme.static_inputs:
                self.parameters[f"{module}.input_absmax"] = input_range(linears[module])
        for index, fold in enumerate(group):
            alpha = chosen[index].alpha if index in chosen else None
            how = {"kind": fold.kind, "producer": fold.producer, "alpha": alpha}
            self.report["smoothing"] |= dict.fromkeys(fold.consumers, how)

    def _round(self, modules: Sequence[str], moments: Mapping[str, Moments]) -> None:
        linears = {module: replace(self.linears[module], moments=moments.get(module)) for module in modules}
        linears = self.subject.with_parameters(linears, self.parameters)
        found, costs, fallen = solve_roundings(linears, self.ranks)
        for module, linear in found.items():
            self.parameters |= {f"{module}.{name}": value for name, value in linear.parameters.items()}
        self.report["errors"] |= {module: asdict(cost) for module, cost in costs.items()}
        self.report["fallen"] += fallen

    def _absorb(self, name: str, factor: Tensor) -> Tensor:
        owner, leaf = name.rpartition(".")[::2]
        is_norm = any(fold.kind == "norm" and fold.producer == owner for fold in self._own_folds)
        tensor = read_tensor(self.subject.checkpoint, name)
        norm = self.part.owner_of(name)
        return absorbed(tensor, factor.to(tensor.device), norm, is_norm_weight=is_norm and leaf == "weight")


def needs_second(algorithm: Algorithm) -> bool:
    """Whether an algorithm works on second moments; fixed SmoothQuant needs the largest magnitudes alone."""
    return algorithm.name in ("awq", "gptq") or (algorithm.name == "smoothquant" and algorithm.alpha == "search")


def passes(units: Iterable[Fold], linears: Mapping[str, Linear], moments_bytes: int) -> Iterator[list[Fold]]:
    """Units whose moments are held at once: as many as fit, at least one. Pure."""
    group: list[Fold] = []
    held = 0
    for unit in units:
        inputs = {module.rpartition(".")[0]: linears[module].weight.shape[1] for module in unit.consumers}
        nbytes = sum(ELEMENT_BYTES * width * width for width in inputs.values())
        if group and held + nbytes > moments_bytes:
            yield group
            group, held = [], 0
        group.append(unit)
        held += nbytes
    if group:
        yield group


def coverage(modules: Iterable[str], routed: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """By block of experts: tokens of each by index, the least, the median, and how many experts saw none."""
    blocks: dict[str, dict[int, int]] = defaultdict(dict)
    for module in modules:
        if expert := expert_of(module):
            tokens = blocks[expert.block]
            tokens[expert.index] = max(tokens.get(expert.index, 0), routed.get(module, 0))
    found = {}
    for block, by_index in blocks.items():
        seen = [by_index[index] for index in sorted(by_index)]
        found[block] = {"tokens": seen, "least": min(seen), "median": median(seen), "none": seen.count(0)}
    return found
