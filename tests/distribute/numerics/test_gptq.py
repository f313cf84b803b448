"""GPTQ against a slow reference in fp64 that eliminates one column after the other."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distribute.numerics.codec import Ranges
from distribute.numerics.gptq import Solution, prepare, solve
from distribute.numerics.moments import ROWS, output_error, second_moments
from distribute.numerics.search import group_ranges
from tests.distribute.numerics.grids import asymmetric, decoded, inputs, nearest_codes, symmetric, weights


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BOTH = pytest.mark.parametrize("grid_of", [symmetric, asymmetric])


def slow_codes(
    rows: torch.Tensor, moments: torch.Tensor, grid_of, group: int, *, damping=0.01, order=None, known=None
):
    """Optimal brain quantization in a fixed order: fp64, the whole inverse reduced by a row and a column a step."""
    width = rows.shape[1]
    damped = moments.double() + damping * moments.diagonal().double().mean() * torch.eye(width, dtype=torch.float64)
    inverse, left = damped.inverse(), rows.double().clone()
    codes = torch.zeros(rows.shape, dtype=torch.int8)
    for column in range(width) if order is None else order:
        index = column // group
        if known is not None:
            grid = grid_of(known)
        elif column % group == 0:
            own = left[:, column : column + group].float()
            grid, index = grid_of(group_ranges(own, group)), 0
        else:
            index = 0
        now = left[:, column].float()[:, None]
        codes[:, column] = grid.codes(now, index)[:, 0]
        value = grid.values(codes[:, column, None].clone(), index)[:, 0].double()
        error = (left[:, column] - value) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        inverse = inverse - inverse[:, column, None] * inverse[column] / inverse[column, column]
        inverse[column, column] = 1.0  # coded: never used again
    return codes


def error_of(solution: Solution, rows: torch.Tensor, moments: torch.Tensor, grid_of, group: int) -> float:
    return output_error(decoded(solution.codes, grid_of(solution.ranges), group) - rows.float(), moments).item()


def nearest_error(rows: torch.Tensor, moments: torch.Tensor, grid_of, group: int) -> float:
    grid = grid_of(group_ranges(rows, group))
    return output_error(decoded(nearest_codes(rows, grid, group), grid, group) - rows.float(), moments).item()


@BOTH
@pytest.mark.parametrize("group", [8, 48, 64, 96, 192])
def test_codes_equal_the_slow_reference(grid_of, group: int) -> None:
    rows, moments = weights(16, 192, seed=1), second_moments(inputs(500, 192))
    solution = solve(rows, prepare(moments, dtype=torch.float64), grid_of, group=group)
    assert torch.equal(solution.codes, slow_codes(rows, moments, grid_of, group))


@BOTH
def test_codes_by_activity_equal_the_slow_reference_and_keep_their_columns(grid_of) -> None:
    rows, moments = weights(16, 256, seed=2), second_moments(inputs(600, 256))
    factor = prepare(moments, by_activity=True, dtype=torch.float64)
    ranges = group_ranges(rows, 64)
    solution = solve(rows, factor, grid_of, group=64, ranges=ranges)
    order = moments.diagonal().argsort(descending=True, stable=True).tolist()
    assert factor.order.tolist() == order
    assert torch.equal(solution.codes, slow_codes(rows, moments, grid_of, 64, order=order, known=ranges))
    assert solution.ranges is ranges


@BOTH
@pytest.mark.parametrize("by_activity", [False, True])
@pytest.mark.parametrize("group", [32, 128, 256])
def test_outputs_err_less_than_with_the_nearest_codes(grid_of, by_activity: bool, group: int) -> None:
    rows, moments = weights(64, 256, seed=3, dtype=torch.bfloat16), second_moments(inputs(1000, 256))
    ranges = group_ranges(rows, group) if by_activity else None
    solution = solve(rows, prepare(moments, by_activity=by_activity), grid_of, group=group, ranges=ranges)
    assert error_of(solution, rows, moments, grid_of, group) < 0.8 * nearest_error(rows, moments, grid_of, group)


def test_independent_inputs_get_the_nearest_codes() -> None:
    rows = weights(10, 256, seed=4)
    solution = solve(rows, prepare(torch.eye(256) * 7), symmetric, group=64)
    assert torch.equal(solution.codes, nearest_codes(rows, symmetric(group_ranges(rows, 64)), 64))


def test_the_error_is_that_of_the_damped_moments() -> None:
    rows, moments = weights(30, 256, seed=5), second_moments(inputs(900, 256))
    solution = solve(rows, prepare(moments, damping=0.05), symmetric, group=64)
    damped = moments + 0.05 * moments.diagonal().mean() * torch.eye(256)
    change = decoded(solution.codes, symmetric(solution.ranges), 64) - rows
    torch.testing.assert_close(solution.error, ((change @ damped) * change).sum(1), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("threads", [1, 2])
@BOTH
def test_slices_at_whole_blocks_of_rows_give_the_bits_of_the_whole(grid_of, threads: int) -> None:
    torch.set_num_threads(threads)
    rows, factor = weights(5 * ROWS + 7, 320, seed=6), prepare(second_moments(inputs(700, 320)))
    whole = solve(rows, factor, grid_of, group=32)
    cuts = [0, ROWS, 4 * ROWS, 5 * ROWS, len(rows)]
    parts = [solve(rows[a:b], factor, grid_of, group=32) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([part.ranges.low for part in parts]), whole.ranges.low)
    assert torch.equal(torch.cat([part.ranges.high for part in parts]), whole.ranges.high)
    assert torch.equal(torch.cat([part.error for part in parts]), whole.error)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 70), groups=st.integers(1, 5), group=st.sampled_from([1, 3, 16, 50, 130]), dead=st.booleans())
def test_every_width_and_group_is_coded_whole_and_within_its_ranges(
    n: int, groups: int, group: int, dead: bool
) -> None:
    width = groups * group
    rows, x = weights(n, width, seed=n), inputs(width + 3, width, seed=groups)
    if dead:
        x[:, ::2] = 0
    solution = solve(rows, prepare(second_moments(x)), symmetric, group=group)
    assert solution.codes.shape == rows.shape
    assert solution.codes.min() >= -8 and solution.codes.max() <= 7
    assert solution.ranges.low.shape == (n, groups)
    assert torch.all(solution.ranges.low <= 0) and torch.all(solution.ranges.high >= 0)


def test_a_feature_that_never_moved_keeps_its_nearest_codes_and_disturbs_no_other() -> None:
    rows, x = weights(20, 128, seed=7), inputs(500, 128)
    x[:, 5], x[:, 90] = 0, 0
    live = [column for column in range(128) if column not in (5, 90)]
    ranges = group_ranges(rows, 128)
    whole = solve(rows, prepare(second_moments(x), dtype=torch.float64), symmetric, group=128, ranges=ranges)
    alone = solve(
        rows[:, live], prepare(second_moments(x[:, live]), dtype=torch.float64), symmetric, group=126, ranges=ranges
    )
    assert torch.equal(whole.codes[:, live], alone.codes)
    assert torch.equal(whole.codes[:, [5, 90]], nearest_codes(rows, symmetric(ranges), 128)[:, [5, 90]])


def test_inputs_that_never_moved_give_the_nearest_codes() -> None:
    rows = weights(6, 64, seed=8)
    solution = solve(rows, prepare(torch.zeros(64, 64)), symmetric, group=32)
    assert torch.equal(solution.codes, nearest_codes(rows, symmetric(group_ranges(rows, 32)), 32))


def test_without_damping_what_cannot_be_inverted_is_damped_a_little() -> None:
    moments = second_moments(inputs(400, 32))
    assert prepare(moments, damping=0.0).damping == 0.0
    moments[3], moments[:, 3] = 0, 0
    assert prepare(moments, damping=0.0).damping == pytest.approx(0.001)


def test_zero_weights_get_zero_codes() -> None:
    rows = weights(6, 64, seed=9)
    rows[2] = 0
    solution = solve(rows, prepare(second_moments(inputs(200, 64))), symmetric, group=32)
    assert not solution.codes[2].any()
    assert solution.ranges.absmax[2].tolist() == [0.0, 0.0]


def test_fewer_tokens_than_features_are_factored_with_damping() -> None:
    factor = prepare(second_moments(inputs(20, 128)))
    assert factor.damping == 0.01
    damped = second_moments(inputs(20, 128)).double() / factor.unit + 0.01 * torch.eye(128, dtype=torch.float64)
    product = factor.upper.double().T @ factor.upper.double() @ damped
    torch.testing.assert_close(product, torch.eye(128, dtype=torch.float64), rtol=0, atol=2e-3)


def test_damping_grows_until_the_moments_are_positive_definite() -> None:
    moments = torch.eye(32)
    moments[3, 4] = moments[4, 3] = 1.05  # the least eigenvalue is -0.05
    assert prepare(moments, damping=0.001).damping == pytest.approx(0.1)


def test_hopeless_moments_fall_back_to_the_nearest_codes_and_say_so() -> None:
    moments = -10 * torch.ones(64, 64)
    moments.fill_diagonal_(1.0)
    factor = prepare(moments)
    assert factor.damping is None
    rows = weights(6, 64, seed=10)
    ranges = group_ranges(rows, 64)
    assert torch.equal(solve(rows, factor, symmetric, group=64).codes, nearest_codes(rows, symmetric(ranges), 64))


@pytest.mark.parametrize(
    ("moments", "damping", "message"),
    [
        (torch.full((4, 4), float("nan")), 0.01, "not finite"),
        (torch.eye(4) * float("inf"), 0.01, "not finite"),
        (torch.zeros(4, 5), 0.01, r"\[5, 5\], not \[4, 5\]"),
        (-torch.eye(4), 0.01, "negative diagonal"),
        (torch.eye(4), 1.5, "between 0 and 1, not 1.5"),
    ],
)
def test_moments_that_cannot_be_are_refused(moments: torch.Tensor, damping: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(moments, damping=damping)


def test_rows_that_do_not_fit_are_refused() -> None:
    factor = prepare(torch.eye(64))
    with pytest.raises(ValueError, match="finite weights"):
        solve(torch.full((2, 64), float("nan")), factor, symmetric, group=32)
    with pytest.raises(ValueError, match="whole groups of 48"):
        solve(torch.ones(2, 64), factor, symmetric, group=48)
    with pytest.raises(ValueError, match="do not fit"):
        solve(torch.ones(2, 32), factor, symmetric, group=32)
    by_activity = prepare(torch.diag(torch.arange(64.0)), by_activity=True)
    with pytest.raises(ValueError, match="ranges must be given"):
        solve(torch.ones(2, 64), by_activity, symmetric, group=32)


def test_inputs_are_left_as_they_were() -> None:
    rows, moments = weights(6, 64, seed=11), second_moments(inputs(200, 64))
    ranges = group_ranges(rows, 32)
    copies = [t.clone() for t in (rows, moments, ranges.low, ranges.high)]
    factor = prepare(moments)
    solve(rows, factor, symmetric, group=32)
    solve(rows, factor, symmetric, group=32, ranges=Ranges(ranges.low, ranges.high))
    for now, before in zip((rows, moments, ranges.low, ranges.high), copies, strict=True):
        assert torch.equal(now, before)
