"""Ranges by percentile and by squared error; histograms that do not depend on how values were dealt out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.numerics.codec import Ranges
from distribute.numerics.search import (
    BINS,
    Histogram,
    fake_e4m3,
    fake_int8,
    first_least,
    group_ranges,
    histogram,
    mse_ranges,
    percentile_ranges,
)
from tests.distribute.numerics.grids import asymmetric, decoded, fake_in_ranges, nearest_codes, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VALUES = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=30)


def same(a: Histogram, b: Histogram) -> bool:
    return torch.equal(a.counts, b.counts) and a.exponent == b.exponent and torch.equal(a.largest, b.largest)


def squared(rows: torch.Tensor, ranges: Ranges, group: int) -> torch.Tensor:
    return (fake_in_ranges(rows, ranges) - rows.float()).square().unflatten(1, (-1, group)).sum(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranges_are_the_least_and_largest_of_each_group_and_hold_zero(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 2.0, -3.0, 0.5], [-1.0, -2.0, 0.0, 0.0]]).to(dtype)
    ranges = group_ranges(rows, 2)
    assert ranges.low.tolist() == [[0.0, -3.0], [-2.0, 0.0]]
    assert ranges.high.tolist() == [[2.0, 0.5], [0.0, 0.0]]
    assert ranges.low.dtype == ranges.high.dtype == torch.float32


def test_rows_that_are_not_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="10 input features are not whole groups of 4"):
        group_ranges(torch.ones(2, 10), 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("percent", [100.0, 99.0, 90.0, 50.0, 0.1])
def test_a_percentile_of_a_group_is_exact(dtype: torch.dtype, percent: float) -> None:
    rows = weights(5, 80, dtype=dtype)
    ranges = percentile_ranges(rows, 40, percent)
    magnitudes = rows.float().abs().unflatten(1, (2, 40)).sort(dim=2).values
    assert torch.equal(ranges.absmax, magnitudes[:, :, max(1, math.ceil(40 * percent / 100)) - 1])
    whole = group_ranges(rows, 40)
    assert torch.all(ranges.low >= whole.low) and torch.all(ranges.high <= whole.high)


@pytest.mark.parametrize("percent", [0.0, -1.0, 100.5])
def test_a_percentile_outside_of_its_bounds_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 100"):
        percentile_ranges(torch.ones(1, 4), 4, percent)


@pytest.mark.parametrize("group", [16, 64])
def test_squared_error_is_the_least_of_all_multiples(group: int) -> None:
    rows = weights(20, 64, seed=1)
    ranges, chosen = mse_ranges(rows, group, fake_in_ranges)
    whole = group_ranges(rows, group)
    least = squared(rows, ranges, group)
    for step in range(31):
        other = 1 - step / 40
        assert torch.all(least <= squared(rows, Ranges(whole.low * other, whole.high * other), group))
    assert torch.equal(ranges.low, whole.low * chosen) and torch.equal(ranges.high, whole.high * chosen)
    assert chosen.min() < 1.0


def test_an_outlier_is_clipped_where_that_helps_and_zeros_keep_their_range() -> None:
    rows = torch.full((2, 128), 0.55)
    rows[0, 0], rows[1] = 0.9, 0.0
    ranges, chosen = mse_ranges(rows, 128, fake_in_ranges)
    assert chosen[0, 0] < 1.0
    assert chosen[1, 0] == 1.0 and ranges.absmax[1, 0] == 0


def test_ranges_of_a_row_do_not_depend_on_its_neighbours() -> None:
    rows = weights(33, 64, seed=2, dtype=torch.bfloat16)
    whole, _ = mse_ranges(rows, 32, fake_in_ranges)
    parts = [mse_ranges(rows[a:b], 32, fake_in_ranges)[0] for a, b in ((0, 1), (1, 20), (20, 33))]
    assert torch.equal(torch.cat([part.high for part in parts]), whole.high)
    assert torch.equal(torch.cat([part.low for part in parts]), whole.low)


def test_both_ends_of_an_asymmetric_range_shrink_together() -> None:
    rows = weights(20, 64, seed=3) + 0.5

    def fake(rows: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        return decoded(nearest_codes(rows, asymmetric(ranges), 64), asymmetric(ranges), 64)

    ranges, chosen = mse_ranges(rows, 64, fake)
    whole = group_ranges(rows, 64)
    assert torch.all((fake(rows, ranges) - rows).square().sum(1) <= (fake(rows, whole) - rows).square().sum(1))
    assert torch.equal(ranges.low, whole.low * chosen) and torch.equal(ranges.high, whole.high * chosen)


def test_the_first_of_equal_costs_is_taken_and_nan_never() -> None:
    assert first_least(torch.tensor([3.0, 1.0, 1.0])) == 1
    assert first_least(torch.tensor([float("nan"), 2.0, float("inf")])) == 1
    with pytest.raises(ValueError, match="not finite"):
        first_least(torch.tensor([float("nan"), float("inf")]))


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES, VALUES)
def test_a_histogram_does_not_depend_on_how_values_were_dealt_out(a: list, b: list, c: list) -> None:
    first, second, third = (histogram(torch.tensor(values)) for values in (a, b, c))
    whole = histogram(torch.tensor([*a, *b, *c]))
    assert same(first.merge(second).merge(third), whole)
    assert same(third.merge(first.merge(second)), whole)
    assert int(whole.counts.sum()) == len(a) + len(b) + len(c)


def test_zeros_do_not_widen_the_bins_of_small_values() -> None:
    small = torch.tensor([1e-6, 3e-6])
    assert same(histogram(torch.zeros(3)).merge(histogram(small)), histogram(torch.cat((torch.zeros(3), small))))
    assert histogram(torch.zeros(3)).merge(histogram(small)).exponent < -17


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=40), st.floats(0.01, 100))
def test_a_percentile_leaves_at_most_the_rest_above_to_one_bin(values: list[float], percent: float) -> None:
    found = histogram(torch.tensor(values)).percentile(percent).item()
    magnitudes = sorted(abs(value) for value in values)
    exact = magnitudes[max(1, math.ceil(len(values) * percent / 100)) - 1]
    assert exact <= found <= exact + 2 * magnitudes[-1] / BINS + 2.0**-100


def test_the_whole_is_the_exact_largest_magnitude() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(5))
    assert histogram(x).percentile(100).equal(x.abs().max())
    assert histogram(torch.zeros(0)).percentile(99.9).item() == 0
    assert histogram(torch.zeros(7)).percentile(99.9).item() == 0
    assert histogram(torch.tensor([3e38])).percentile(100).item() == pytest.approx(3e38)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts_are_exact_in_every_dtype(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4000, generator=torch.Generator().manual_seed(6)) * 3).to(dtype)
    found = histogram(x)
    width = 2.0**found.exponent / BINS
    expected = torch.bincount((x.double().abs() / width).floor().long().flatten(), minlength=BINS)
    assert torch.equal(found.counts, expected)
    assert found.counts.dtype == torch.int64
    assert 2.0 ** (found.exponent - 1) <= found.largest < 2.0**found.exponent


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_have_no_histogram(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        histogram(torch.tensor([1.0, value]))


@pytest.mark.parametrize("fake", [fake_int8, fake_e4m3])
def test_squared_error_of_activations_is_close_to_that_of_the_values_themselves(fake) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(7))
    x[0] = 40.0
    found = histogram(x).mse(fake)
    costs = [(fake(x, torch.tensor(limit)) - x).square().sum().item() for limit in torch.linspace(2, 40, 39).tolist()]
    assert (fake(x, found) - x).square().sum().item() <= 1.02 * min(costs)
    if fake is fake_int8:
        assert found < 25


@pytest.mark.parametrize("seed", range(20))
def test_squared_error_never_widens_a_range(seed: int) -> None:
    x = torch.randn(5, generator=torch.Generator().manual_seed(seed))
    assert histogram(x).mse(fake_e4m3, stride=1) <= x.abs().max()


def test_an_even_spread_keeps_its_largest_magnitude() -> None:
    x = torch.linspace(-1, 1, 10001)
    assert histogram(x).mse(fake_int8) > 0.99
    assert histogram(torch.zeros(4)).mse(fake_int8) == 0
