"""SmoothQuant: its formula, who shares a scale, and the search of alpha."""

import pytest
import torch

from distribute.numerics.moments import second_moments
from distribute.numerics.search import fake_int8
from distribute.numerics.smoothquant import column_absmax, input_scale, search_alpha, smoothed_weight, smoothing
from tests.distribute.numerics.grids import inputs, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fake_rows(rows: torch.Tensor) -> torch.Tensor:
    return fake_int8(rows.float(), rows.float().abs().amax(dim=1, keepdim=True))


def outlier_inputs() -> torch.Tensor:
    x = inputs(400, 64, seed=3)
    x[:, 7] *= 100
    return x


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_scale_follows_the_formula(alpha: float) -> None:
    channels, columns = torch.tensor([2.0, 0.5, 8.0]), torch.tensor([0.1, 3.0, 0.02])
    expected = [w ** (1 - alpha) / a**alpha for a, w in zip(channels.tolist(), columns.tolist(), strict=True)]
    assert input_scale(channels, columns, alpha).tolist() == pytest.approx(expected)


def test_the_scale_is_bounded() -> None:
    scale = input_scale(torch.tensor([1e6, 1e-6, 1.0]), torch.tensor([1.0, 1.0, 0.0]), 1.0)
    assert scale.tolist() == pytest.approx([1e-4, 1e4, 1.0])
    assert input_scale(torch.tensor([1.0]), torch.tensor([0.0]), 0.5).tolist() == pytest.approx([1e-4])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_feature_that_never_moved_keeps_its_scale(alpha: float) -> None:
    channels = torch.tensor([0.0, 2.0**-31, 1.0])
    assert input_scale(channels, torch.tensor([0.0, 3.0, 1.0]), alpha).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_stay_the_same_but_for_rounding(dtype: torch.dtype) -> None:
    weight, x = weights(20, 64, dtype=dtype), outlier_inputs()
    applied = smoothing(x.abs().amax(0), [column_absmax(weight)], 0.5)
    assert applied.pre_quant_scale.dtype == dtype
    assert applied.smooth.dtype == torch.float32
    assert torch.equal(applied.smooth, 1.0 / input_scale(x.abs().amax(0), column_absmax(weight), 0.5))
    smoothed = smoothed_weight(weight, applied.smooth)
    assert smoothed.dtype == dtype
    before = x.double() @ weight.double().T
    after = (x.double() * applied.scale.double()) @ smoothed.double().T
    assert (after - before).norm() <= 2 * torch.finfo(dtype).eps * before.norm()


def test_the_absmax_of_the_smoothed_inputs_is_rounded_to_the_models_dtype() -> None:
    x = outlier_inputs()
    channels = x.abs().amax(0)
    applied = smoothing(channels, [column_absmax(weights(20, 64, dtype=torch.bfloat16))], 0.5)
    found = applied.input_absmax(channels)
    assert found.dtype == torch.float32 and found.shape == ()
    assert found == found.to(torch.bfloat16).float()
    assert found.item() == pytest.approx((x * applied.scale).abs().max().item(), rel=2**-7)


def test_linears_that_share_an_input_take_the_mean_of_their_scales() -> None:
    channels = torch.tensor([2.0, 4.0])
    columns = [torch.tensor([1.0, 1.0]).bfloat16(), torch.tensor([4.0, 9.0]).bfloat16()]
    shared = smoothing(channels, columns, 0.5)
    own = [input_scale(channels, each, 0.5).bfloat16() for each in columns]
    assert torch.equal(shared.pre_quant_scale, torch.stack(own).mean(0))
    assert torch.equal(shared.scale, shared.pre_quant_scale.float())


def test_alpha_one_needs_no_mean_so_that_the_scale_is_not_rounded() -> None:
    channels = torch.tensor([3.0, 7.0])
    columns = [torch.tensor([1.0, 1.0]).bfloat16(), torch.tensor([4.0, 9.0]).bfloat16()]
    assert torch.equal(smoothing(channels, columns).scale, 1.0 / channels)


def test_column_maxima_of_slices_join() -> None:
    weight = weights(33, 16, dtype=torch.bfloat16)
    parts = torch.maximum(column_absmax(weight[:10]), column_absmax(weight[10:]))
    assert torch.equal(parts, column_absmax(weight))
    assert column_absmax(weight[:0]).tolist() == [0.0] * 16


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_alpha_outside_of_its_bounds_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        input_scale(torch.ones(2), torch.ones(2), alpha)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        input_scale(torch.tensor([value]), torch.ones(1), 0.5)
    with pytest.raises(ValueError, match="finite"):
        input_scale(torch.ones(1), torch.tensor([value]), 0.5)


def test_the_searched_alpha_is_close_to_the_best_that_running_the_layer_finds() -> None:
    x, both = outlier_inputs(), [weights(48, 64, seed=1), weights(16, 64, seed=2)]
    channels, columns = x.abs().amax(0), [column_absmax(weight) for weight in both]
    choice = search_alpha(channels, both, [second_moments(x)] * 2, [len(x)] * 2, [fake_rows] * 2)
    measured = []
    for step in range(11):
        applied = smoothing(channels, columns, step / 10)
        coded = fake_int8(x * applied.scale, applied.input_absmax(channels))
        outputs = [coded @ fake_rows(smoothed_weight(weight, applied.smooth)).T - x @ weight.T for weight in both]
        measured.append(sum(out.square().sum().item() for out in outputs))
    assert 0 < choice.alpha < 1
    assert measured[round(choice.alpha * 10)] <= 1.05 * min(measured)
    torch.testing.assert_close(choice.errors, torch.tensor(measured, dtype=torch.float64), rtol=0.25, atol=0)
    assert torch.equal(choice.smoothing.scale, smoothing(channels, columns, choice.alpha).scale)
