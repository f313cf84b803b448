"""Presets by budget: which ones each group of layers may have, what they cost, and the recipe that follows.

A group is what engines load as one matrix: q/k/v, gate/up, all experts of a layer, or one linear layer. What a
preset costs is what its dialect stores, scales included; what it loses is measured (distribute/sensitivity.py).
The recipe that follows has no `auto` left: its presets are written out, so everything after it is as with a
recipe that a person wrote. Torch-free.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from distribute.allocation import Allocation, Choice, Group, allocate
from distribute.dialects.table import DIALECTS
from distribute.errors import RecipeError
from distribute.job import read_json, write_json
from distribute.layers import (
    KEEP,
    QUANTIZE,
    decide,
    expert_of,
    fitting_group_size,
    fused_siblings,
    matrix_of,
    natural_key,
)
from distribute.plan import find_model_dtype
from distribute.recipe import Recipe, matches
from distribute.scheme import GROUP_SIZES, Scheme
from distribute.source import ITEMSIZE, Checkpoint

TABLE = "sensitivity.json"
#: A preset that any matrix can have: what may be quantized at all is asked with it.
FITS_ALL = "fp8"


@dataclass(frozen=True)
class Candidate:
    """A preset that a group may have: how each of its modules is coded, and the bits that are stored for it."""

    preset: str  # or KEEP
    schemes: Mapping[str, Scheme]  # by module; none for KEEP
    bits: int


@dataclass(frozen=True)
class Question:
    """A group of layers, how many weights they have, and what they may become."""

    names: tuple[str, ...]
    weights: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Inquiry:
    """All that is to be measured. `recipe`: with a group size that is decided; `model_dtype` as in "BF16"."""

    questions: tuple[Question, ...]  # in natural order
    recipe: Recipe
    model_dtype: str


@dataclass(frozen=True)
class Table:
    """What was measured: `groups` with the error of each choice. `group_size`: of the int4 choices."""

    group_size: int | None
    groups: tuple[Group, ...]

    def write(self, folder: Path) -> None:
        """As JSON, whole or not at all."""
        write_json(folder / TABLE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Table":
        """What `write` wrote."""
        plain = read_json(folder / TABLE)
        groups = (
            Group(tuple(group["names"]), group["weights"], tuple(Choice(**choice) for choice in group["choices"]))
            for group in plain["groups"]
        )
        return cls(plain["group_size"], tuple(groups))


def inquire(checkpoint: Checkpoint, recipe: Recipe) -> Inquiry:
    """Every group with its candidates, from headers alone.

    A preset whose groups do not fit a layer is no candidate there. A pattern of `overrides` leaves one candidate.

    Raises:
        RecipeError, SourceError: as `distribute.layers.decide`; or a group has no candidate.
    """
    assert recipe.auto is not None
    decisions = decide(checkpoint, recipe.model_copy(update={"preset": FITS_ALL, "overrides": {}, "auto": None}))
    model_dtype = find_model_dtype(checkpoint, decisions)
    modules = [module for module, decision in decisions.items() if decision.action == QUANTIZE]
    shapes = {module: matrix_of(module, checkpoint.tensors).shape for module in modules}
    _refuse_unmatched(recipe, shapes)
    recipe = _with_group_size(recipe, shapes)
    questions = []
    for names in groups_of(modules):
        own = {module: shapes[module] for module in names}
        candidates = tuple(_candidates(own, recipe, model_dtype))
        if not candidates:
            raise RecipeError(
                f"none of {', '.join(recipe.presets)} fits {names[0]} of shape {list(shapes[names[0]])}; "
                "offer another preset in auto, or auto: {keep: true}"
            )
        questions.append(Question(names, sum(map(prod, own.values())), candidates))
    return Inquiry(tuple(questions), recipe, model_dtype)


def groups_of(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """What gets one preset together, in natural order. Pure."""
    modules = sorted(modules, key=natural_key)
    blocks: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if expert := expert_of(module):
            blocks[expert.block].append(module)
    together = [*map(tuple, blocks.values())]
    taken = {module for block in together for module in block}
    together += fused_siblings(module for module in modules if module not in taken)
    taken |= {module for group in together for module in group}
    together += [(module,) for module in modules if module not in taken]
    return sorted(together, key=lambda group: natural_key(group[0]))


def choose(recipe: Recipe, table: Table) -> tuple[Recipe, Allocation]:
    """The recipe with its presets written out, and what it is expected to cost and to lose.

    Raises:
        BudgetError: no choice is that small.
    """
    assert recipe.auto is not None
    found = allocate(table.groups, recipe.auto.bits)
    presets = Counter(choice.preset for choice in found.choices if choice.preset != KEEP)
    base = presets.most_common(1)[0][0] if presets else recipe.preset
    overrides, ignore = dict(recipe.overrides), [*recipe.ignore]
    for group, choice in zip(table.groups, found.choices, strict=True):
        if choice.preset == KEEP:
            ignore += _patterns(group.names)
        elif choice.preset != base:
            overrides |= dict.fromkeys(_patterns(group.names), choice.preset)
    values = recipe.model_dump() | {"auto": None, "preset": base, "overrides": overrides, "ignore": tuple(ignore)}
    if recipe.group_size == "auto":
        values["group_size"] = table.group_size
    return Recipe.model_validate(values), found


def largest(inquiry: Inquiry) -> Recipe:
    """The recipe of about as many bits as the budget allows: what can be said before anything is measured.

    Raises:
        BudgetError: no choice is that small.
    """
    groups = []
    for question in inquiry.questions:
        choices = tuple(Choice(c.preset, c.bits, _expected(c.bits / question.weights)) for c in question.candidates)
        groups.append(Group(question.names, question.weights, choices))
    return choose(inquiry.recipe, Table(None, tuple(groups)))[0]


def _expected(bits: float) -> float:
    """Relative error of rounding to so many bits: one more halves the step, which quarters the noise."""
    return float(4.0**-bits)


def _patterns(names: Sequence[str]) -> list[str]:
    """Few patterns that name these modules: a block of experts by one."""
    expert = expert_of(names[0])
    return [f"{expert.block}.*"] if expert else list(names)


def _candidates(shapes: Mapping[str, tuple[int, int]], recipe: Recipe, model_dtype: str) -> Iterable[Candidate]:
    assert recipe.auto is not None
    tensors = DIALECTS[recipe.dialect].tensors
    pinned = {preset for pattern, preset in recipe.overrides.items() if any(matches(pattern, m) for m in shapes)}
    for preset in pinned or recipe.candidates:
        try:
            size = fitting_group_size(shapes, recipe, preset)
        except RecipeError:
            continue
        scheme = recipe.scheme_of(preset, size)
        stored = [spec for shape in shapes.values() for spec in tensors(shape, scheme, model_dtype)]
        bits = sum(8 * ITEMSIZE[spec.dtype] * prod(spec.shape) for spec in stored)
        yield Candidate(preset, dict.fromkeys(shapes, scheme), bits)
    if recipe.auto.keep and not pinned:
        yield Candidate(KEEP, {}, 8 * ITEMSIZE[model_dtype] * sum(map(prod, shapes.values())))


def _with_group_size(recipe: Recipe, shapes: Mapping[str, tuple[int, int]]) -> Recipe:
    """`group_size: auto` decided for all layers, whichever of them become int4."""
    if recipe.group_size != "auto":
        return recipe
    fitting = [size for size in GROUP_SIZES if not any(columns % size for _, columns in shapes.values())]
    return recipe.model_copy(update={"group_size": fitting[0] if fitting else GROUP_SIZES[-1]})


def _refuse_unmatched(recipe: Recipe, modules: Iterable[str]) -> None:
    for pattern in recipe.overrides:
        if not any(matches(pattern, module) for module in modules):
            raise RecipeError(f"overrides pattern {pattern!r} matches no module that is quantized")
