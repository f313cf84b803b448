"""The least error under a budget of bits, beside every combination tried."""

import math
import time
from fractions import Fraction
from itertools import product
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distribute.allocation import Allocation, BudgetError, Choice, Group, allocate

choices = st.builds(
    Choice,
    preset=st.just("p"),
    bits=st.integers(0, 40),
    error=st.one_of(st.integers(0, 6).map(float), st.floats(0, 1e9), st.sampled_from([5e-324, 1e-300, 1e300])),
)
groups = st.builds(
    Group,
    names=st.just(("layer",)),
    weights=st.integers(1, 5),
    choices=st.lists(choices, min_size=1, max_size=4).map(tuple),
)


def brute_force(given_groups: list[Group], mean_bits: float) -> tuple[Fraction, int] | None:
    """Least exact error and the fewest bits that have it."""
    budget = Fraction(str(mean_bits)) * sum(group.weights for group in given_groups)
    fitting = [
        (sum((Fraction(one.error) for one in chosen), Fraction(0)), sum(one.bits for one in chosen))
        for chosen in product(*(group.choices for group in given_groups))
        if sum(one.bits for one in chosen) <= budget
    ]
    return min(fitting, default=None)


@given(st.lists(groups, min_size=1, max_size=6), st.floats(0, 16))
@example([Group(("a",), 1, (Choice("p", 5, 1.0), Choice("p", 5, 0.5)))], 5.0)
def test_no_combination_is_better(given_groups: list[Group], mean_bits: float) -> None:
    best = brute_force(given_groups, mean_bits)
    if best is None:
        with pytest.raises(BudgetError):
            allocate(given_groups, mean_bits)
        return
    found = allocate(given_groups, mean_bits)
    assert all(one in group.choices for one, group in zip(found.choices, given_groups, strict=True))
    assert (sum(Fraction(one.error) for one in found.choices), sum(one.bits for one in found.choices)) == best


@given(st.lists(groups, min_size=1, max_size=6))
def test_the_budget_that_the_error_names_works(given_groups: list[Group]) -> None:
    least = sum(min(one.bits for one in group.choices) for group in given_groups)
    if least == 0:
        return
    below = math.nextafter(least / sum(group.weights for group in given_groups), 0) * (1 - 1e-9)
    with pytest.raises(BudgetError, match="least that these presets allow is") as caught:
        allocate(given_groups, below)
    named = float(str(caught.value).split("allow is ")[1].split(";")[0])
    assert allocate(given_groups, named).bits <= named


def model(layers: int, seed: int) -> list[Group]:
    """Groups as a decoder has them: four sizes, errors that fall with bits, some layers far more sensitive."""
    random = Random(seed)
    made = []
    for index in range(layers):
        weights = (3 << 20, 1 << 20, 11 << 20, 11 << 19)[index % 4]
        sensitivity = random.lognormvariate(0, 2)
        offered = (4.25, 4.5, 6.0, 8.0, 8.25, 16.0)
        errors = [sensitivity * weights * 4**-bits * random.lognormvariate(0, 0.3) for bits in offered]
        own = tuple(Choice(f"{b:g}", int(b * weights) + 64, e) for b, e in zip(offered, errors, strict=True))
        made.append(Group((f"layer.{index}",), weights, own))
    return made


@pytest.mark.parametrize("mean_bits", [4.3, 5.0, 9.0])
def test_two_thousand_groups_of_six_formats_take_seconds(mean_bits: float) -> None:
    given_groups = model(2000, seed=1)
    began = time.process_time()
    found = allocate(given_groups, mean_bits)
    assert time.process_time() - began < 5
    assert mean_bits - 0.001 < found.bits <= mean_bits


def test_a_larger_budget_never_has_a_larger_error() -> None:
    given_groups = model(40, seed=2)
    errors = [allocate(given_groups, bits / 4).error for bits in range(18, 70)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[-1]


def test_the_most_sensitive_layer_gets_the_bits() -> None:
    offered = [(4, 1.0), (8, 0.1)]
    tough = Group(("tough",), 10, tuple(Choice(str(b), b * 10, e) for b, e in offered))
    tender = Group(("tender",), 10, tuple(Choice(str(b), b * 10, 5 * e) for b, e in offered))
    found = allocate([tough, tender], 6.0)
    assert found == Allocation((tough.choices[0], tender.choices[1]), bits=6.0, error=1.5)


@pytest.mark.parametrize("error", [-1.0, math.inf, math.nan])
def test_errors_that_are_none_are_refused(error: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        allocate([Group(("a",), 1, (Choice("p", 4, error),))], 5.0)


def test_a_group_without_choices_is_refused() -> None:
    with pytest.raises(ValueError, match="needs weights and choices"):
        allocate([Group(("a",), 1, ())], 5.0)
