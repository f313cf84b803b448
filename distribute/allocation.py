"""One format for each group of layers: the least summed error under a budget of bits. Pure, torch-free.

Exact: costs are whole bits, errors are the exact rationals that floats are, and nothing is rounded but the budget,
downwards. The problem is a multiple-choice knapsack; it is solved by dynamic programming over Pareto fronts of
(bits, error) that a Lagrangian bound keeps small: a state that cannot beat the greedy solution even when
the other groups may pay the best price per bit is dropped (Pisinger, "A minimal algorithm for the multiple-choice
knapsack problem", 1995).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import isfinite, lcm

from distribute.errors import RecipeError


class BudgetError(RecipeError):
    """The budget is below the least bits that the candidates can have."""


@dataclass(frozen=True)
class Choice:
    """One format of a group: its stored bits, scales included, and the error that was measured."""

    preset: str
    bits: int
    error: float


@dataclass(frozen=True)
class Group:
    """Layers that get one format: those that runtimes fuse. `weights`: how many weights they have together."""

    names: tuple[str, ...]
    weights: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Allocation:
    """The choice of each group, in the order of the groups."""

    choices: tuple[Choice, ...]
    bits: float  # mean, of all weights
    error: float  # sum


@dataclass(frozen=True)
class _Option:
    """A choice in exact integers; `index` is its place in the group."""

    bits: int
    error: int
    index: int


@dataclass(frozen=True)
class _Link:
    """The way to a state: the index that was chosen last, and the way before."""

    before: "_Link | None"
    index: int


_State = tuple[int, int, _Link | None]  # bits, error, how


def allocate(groups: Sequence[Group], mean_bits: float) -> Allocation:
    """The choices whose errors have the least sum while the mean of stored bits is at most `mean_bits`.

    Of equal errors the one with the fewest bits is taken.

    Raises:
        BudgetError: no choices are that small; the message has the least mean that is possible.
        ValueError: a group has no weights or no choices, or an error is negative or not finite.
    """
    _check(groups)
    weights = sum(group.weights for group in groups)
    budget = int(Fraction(str(mean_bits)) * weights)  # the decimal number that was written
    options = _exact(groups)
    least = sum(own[0].bits for own in options)
    if least > budget:
        raise BudgetError(
            f"a mean of {mean_bits} bits a weight cannot be reached: the least that these presets allow is "
            f"{_rounded_up(Fraction(least, weights))}; raise the budget or offer smaller presets"
        )
    indices = _solve(options, budget)
    chosen = tuple(group.choices[index] for group, index in zip(groups, indices, strict=True))
    error = sum(Fraction(choice.error) for choice in chosen)
    return Allocation(chosen, sum(choice.bits for choice in chosen) / max(weights, 1), float(error))


def _check(groups: Sequence[Group]) -> None:
    for group in groups:
        if group.weights < 1 or not group.choices:
            raise ValueError(f"group {', '.join(group.names)} needs weights and choices")
        for choice in group.choices:
            if choice.error < 0 or not isfinite(choice.error) or choice.bits < 0:
                raise ValueError(f"{', '.join(group.names)}: {choice} must have finite bits and error, at least 0")


def _rounded_up(least: Fraction) -> float:
    """To four digits, never below: what the message names is a budget that works."""
    return -((-least * 10_000) // 1) / 10_000


def _exact(groups: Sequence[Group]) -> list[list[_Option]]:
    """Undominated options of each group, the fewest bits first; errors in units of their common denominator."""
    unit = lcm(*(Fraction(choice.error).denominator for group in groups for choice in group.choices))
    return [
        _undominated([_Option(c.bits, int(Fraction(c.error) * unit), i) for i, c in enumerate(group.choices)])
        for group in groups
    ]


def _undominated(options: list[_Option]) -> list[_Option]:
    kept: list[_Option] = []
    for option in sorted(options, key=lambda one: (one.bits, one.error, one.index)):
        if not kept or option.error < kept[-1].error:
            kept.append(option)
    return kept


def _solve(options: Sequence[list[_Option]], budget: int) -> list[int]:
    """Index of the choice of each group."""
    best, gain, step = _greedy(options, budget)
    if step == 0:  # everything fits
        return [own[-1].index for own in options]
    # An option's price is step * error + gain * bits. The sum of what a choice pays above the least prices (its
    # regret), and of what unused bits would have cost, is what it loses to the bound: never more than the greedy one.
    prices = [[step * one.error + gain * one.bits for one in own] for own in options]
    bound = sum(map(min, prices)) - gain * budget
    gap = step * sum(one.error for one in best) - bound
    left = [
        [one for one, price in zip(own, of, strict=True) if price - min(of) <= gap]
        for own, of in zip(options, prices, strict=True)
    ]
    floors = [min(of) for of in prices]
    return _fronts(left, floors, budget, gain, step, gap)


def _greedy(options: Sequence[list[_Option]], budget: int) -> tuple[list[_Option], int, int]:
    """A good solution, and the price (error per bit, as a ratio) of the first step that did not fit; 0 if all did."""
    hulls = [_hull_steps(own) for own in options]
    steps = sorted(
        (Fraction(before.error - after.error, after.bits - before.bits), -number, -place)
        for number, hull in enumerate(hulls)
        for place, (before, after) in enumerate(hull)
    )
    best = [own[0] for own in options]
    room = budget - sum(one.bits for one in best)
    price, stuck = Fraction(0), set[int]()
    for slope, negative, place in reversed(steps):
        number = -negative
        before, after = hulls[number][-place]
        if number in stuck or after.bits - before.bits > room:
            stuck.add(number)
            price = price or slope
        else:
            best[number], room = after, room - (after.bits - before.bits)
    return best, price.numerator, price.denominator if price else 0


def _hull_steps(own: list[_Option]) -> list[tuple[_Option, _Option]]:
    """Neighbours on the lower convex hull: each step buys less error per bit than the one before."""
    hull: list[_Option] = []
    for option in own:
        while len(hull) > 1 and _gains_more(hull[-2], hull[-1], option):
            hull.pop()
        hull.append(option)
    return list(pairwise(hull))


def _gains_more(first: _Option, middle: _Option, last: _Option) -> bool:
    """Whether the middle is on or above the line from first to last."""
    straight = (first.error - last.error) * (middle.bits - first.bits)
    return straight >= (first.error - middle.error) * (last.bits - first.bits)


def _fronts(
    options: Sequence[list[_Option]], floors: Sequence[int], budget: int, gain: int, step: int, gap: int
) -> list[int]:
    """Dynamic programming over the groups that still have a choice; those with one alone are added first."""
    order = sorted(range(len(options)), key=lambda number: options[number][-1].bits - options[number][0].bits)
    least = sum(own[0].bits for own in options)
    most = sum(own[-1].bits for own in options)
    floor = 0
    front: list[_State] = [(0, 0, None)]
    for number in order:
        own = options[number]
        least, most, floor = least - own[0].bits, most - own[-1].bits, floor + floors[number]
        grown = [
            (bits + one.bits, error + one.error, _Link(link, one.index)) for bits, error, link in front for one in own
        ]
        grown.sort(key=lambda state: state[:2])
        front = []
        for state in grown:
            bits, error, _ = state
            if bits + least > budget:
                break
            regret = step * error + gain * bits - floor
            unused = gain * max(0, budget - bits - most)
            if regret + unused <= gap and (not front or error < front[-1][1]):
                front.append(state)
    return _traced(front[-1], order)


def _traced(state: _State, order: Sequence[int]) -> list[int]:
    indices = [0] * len(order)
    link = state[2]
    for number in reversed(order):
        assert link is not None
        indices[number], link = link.index, link.before
    return indices
