"""AWQ: its formula, what the search may never make worse, and clipping group by group."""

import itertools

import pytest
import torch

from distribute.numerics.awq import (
    ALPHAS,
    RATIOS,
    clip,
    relative_magnitudes,
    scale_error,
    search_scale,
    weight_scale,
)
from distribute.numerics.codec import Ranges
from distribute.numerics.moments import ROWS, diagonal_blocks, output_error, second_moments
from distribute.numerics.search import group_ranges
from distribute.numerics.smoothquant import smoothed_weight
from tests.distribute.numerics.grids import fake, fake_in_ranges, inputs, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_magnitudes_are_relative_to_their_group() -> None:
    weight = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.0, 0.0, 5.0, -5.0]])
    assert relative_magnitudes(weight, 2).tolist() == pytest.approx([0.25, 0.5, 1.0, 0.5])
    assert relative_magnitudes(weight, 4).tolist() == pytest.approx([1 / 6, 1 / 3, 1.0, 0.5])


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_the_scale_follows_the_formula_and_is_centred(alpha: float) -> None:
    a, w = torch.tensor([2.0, 0.5, 8.0]), torch.tensor([0.1, 0.3, 0.2])
    raw = [x**alpha / y ** (1 - alpha) for x, y in zip(a.tolist(), w.tolist(), strict=True)]
    expected = [value / (max(raw) * min(raw)) ** 0.5 for value in raw]
    assert weight_scale(a, w, alpha).tolist() == pytest.approx(expected)


def test_no_alpha_is_no_scaling() -> None:
    assert weight_scale(torch.tensor([2.0, 3.0]), torch.tensor([0.1, 0.2]), None).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_features_that_never_moved_are_left_alone(alpha: float) -> None:
    a, w = torch.tensor([2.0, 0.0, 8.0]), torch.tensor([0.1, 0.3, 0.2])
    scale = weight_scale(a, w, alpha)
    assert scale[1] == 1.0
    assert torch.equal(scale[[0, 2]], weight_scale(a[[0, 2]], w[[0, 2]], alpha))
    assert weight_scale(torch.zeros(3), w, alpha).tolist() == [1.0, 1.0, 1.0]


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        weight_scale(torch.tensor([float("nan")]), torch.ones(1), 0.5)
    weight = torch.ones(2, 4)
    weight[1, 1] = float("inf")
    with pytest.raises(ValueError, match="finite"):
        search_scale([weight], torch.ones(4), [torch.eye(4)], [fake(4)], group=4)


def test_the_error_is_that_of_the_outputs() -> None:
    weight, x = weights(24, 64, dtype=torch.bfloat16), inputs(300, 64)
    scale = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5
    coded = fake(32)(smoothed_weight(weight, scale))
    expected = ((x / scale) @ coded.T - x @ weight.float().T).double().square().sum().item()
    assert scale_error(weight, scale, second_moments(x), fake(32)).item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_searched_scale_errs_least_and_never_more_than_none(dtype: torch.dtype) -> None:
    weight, x = weights(48, 128, seed=1, dtype=dtype), inputs(500, 128)
    moments, mean = second_moments(x), x.abs().mean(0)
    choice = search_scale([weight], mean, [moments], [fake(32)], group=32)
    unscaled = output_error(fake(32)(weight) - weight.float(), moments)
    assert choice.errors.shape == (len(ALPHAS),)
    torch.testing.assert_close(choice.errors[0], unscaled)
    assert choice.errors.min() == choice.errors[ALPHAS.index(choice.alpha)]
    assert choice.errors.min() < 0.8 * unscaled
    assert torch.equal(choice.scale, weight_scale(mean, relative_magnitudes(weight, 32), choice.alpha))


def test_weights_that_code_exactly_are_not_scaled() -> None:
    weight = torch.randint(-7, 8, (40, 64), generator=torch.Generator().manual_seed(2)) * 0.25
    weight[:, ::32] = 7.2 * 0.25  # with it the grid of every group has steps of 0.25, and all but it are whole
    choice = search_scale(
        [weight], torch.ones(64), [torch.diag(torch.arange(64) % 32 > 0).float()], [fake(32)], group=32
    )
    assert choice.alpha is None
    assert choice.smoothing(torch.float32).smooth.tolist() == [1.0] * 64


def test_linears_that_share_an_input_search_one_scale() -> None:
    both, x = [weights(16, 64, seed=3), weights(32, 64, seed=4)], inputs(400, 64)
    moments, mean = second_moments(x), x.abs().mean(0)
    together = search_scale(both, mean, [moments] * 2, [fake(32)] * 2, group=32)
    joined = search_scale([torch.cat(both)], mean, [moments], [fake(32)], group=32)
    torch.testing.assert_close(together.errors, joined.errors)
    assert torch.equal(together.scale, joined.scale)


def test_zero_weights_keep_a_finite_scale() -> None:
    choice = search_scale([torch.zeros(8, 64)], torch.ones(64), [torch.eye(64)], [fake(32)], group=32)
    assert choice.scale.isfinite().all() and (choice.scale > 0).all()
    assert choice.errors.tolist() == [0.0] * len(ALPHAS)


def group_errors(rows: torch.Tensor, x: torch.Tensor, ranges: Ranges, group: int) -> torch.Tensor:
    """fp64 [n, groups]: the error of the outputs of each group alone."""
    delta = (fake_in_ranges(rows, ranges) - rows.float()).double().unflatten(1, (-1, group))
    return torch.einsum("tgk,ngk->tng", x.double().unflatten(1, (-1, group)), delta).square().sum(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_group_is_clipped_where_its_outputs_err_least(dtype: torch.dtype) -> None:
    rows, x = weights(ROWS + 9, 64, seed=5, dtype=dtype), inputs(300, 64)
    ranges, ratio = clip(rows, diagonal_blocks(second_moments(x), 32), fake_in_ranges, group=32)
    whole = group_ranges(rows, 32)
    assert torch.equal(ranges.high, whole.high * ratio)
    least = group_errors(rows, x, ranges, 32)
    for other in RATIOS:
        assert torch.all(least <= group_errors(rows, x, Ranges(whole.low * other, whole.high * other), 32) * 1.0001)
    assert ratio.unique().numel() > 3


def test_clipping_does_not_depend_on_how_rows_were_dealt_out() -> None:
    rows, blocks = weights(3 * ROWS + 5, 64, seed=6), diagonal_blocks(second_moments(inputs(300, 64)), 16)
    whole, _ = clip(rows, blocks, fake_in_ranges, group=16)
    cuts = [0, ROWS, 3 * ROWS, len(rows)]
    parts = [clip(rows[a:b], blocks, fake_in_ranges, group=16)[0] for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat([part.low for part in parts]), whole.low)
    assert torch.equal(torch.cat([part.high for part in parts]), whole.high)


def test_groups_without_inputs_or_weights_are_not_clipped() -> None:
    rows, x = weights(4, 64, seed=7), inputs(300, 64)
    rows[2], x[:, :32] = 0, 0
    _, ratio = clip(rows, diagonal_blocks(second_moments(x), 32), fake_in_ranges, group=32)
    assert torch.all(ratio[:, 0] == 1) and torch.all(ratio[2] == 1)
