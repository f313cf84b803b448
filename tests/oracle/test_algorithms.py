"""Scales and codes equal those of nvidia-modelopt's own calibration, run on one linear layer on CPU."""

import copy

import pytest
import torch

from distribute.numerics.awq import clip, search_scale
from distribute.numerics.codec import Grid, Ranges
from distribute.numerics.gptq import prepare, solve
from distribute.numerics.moments import diagonal_blocks, second_moments
from distribute.numerics.search import fake_int8, group_ranges, histogram, mse_ranges
from distribute.numerics.smoothquant import column_absmax, smoothed_weight, smoothing
from tests.distribute.numerics.grids import inputs, weights

pytest.importorskip("modelopt", reason="needs the dependency group `oracle`")
pytestmark = pytest.mark.filterwarnings("ignore")

import modelopt.torch.quantization as mtq  # noqa: E402
from modelopt.torch.quantization.calib import HistogramCalibrator  # noqa: E402
from modelopt.torch.quantization.utils.calib_utils import (  # noqa: E402
    compute_hessian_inverse,
    gptq_blockwise_update,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def reference(weight: torch.Tensor, batches: list[torch.Tensor], config: dict, **algorithm) -> torch.nn.Linear:
    """The layer after the reference quantized it in place."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight.clone()
    config = copy.deepcopy(config) | {"algorithm": algorithm}
    model = mtq.quantize(torch.nn.Sequential(linear), config, lambda model: [model(x) for x in batches])
    return model[0]


def batches_of(dtype: torch.dtype) -> list[torch.Tensor]:
    return [part.to(dtype) for part in inputs(192, 256, seed=1).split(64)]


def int4(ranges: Ranges) -> Grid:
    """The four-bit grid of the reference: absmax / 7."""
    return Grid(ranges.absmax / 7, None, -8, 7)


def fake_int4(rows: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    grid, parts = int4(ranges), rows.split(128, dim=1)
    return torch.cat([grid.values(grid.codes(part, index), index) for index, part in enumerate(parts)], dim=1)


@DTYPES
def test_awq_scales(dtype: torch.dtype) -> None:
    weight, batches = weights(96, 256, dtype=dtype), batches_of(dtype)
    theirs = reference(weight, batches, mtq.INT4_AWQ_CFG, method="awq_lite", alpha_step=0.1, debug=True)
    mean = torch.stack([x.abs().mean(dim=0).float() for x in batches]).mean(dim=0)
    moments = sum(second_moments(x) for x in batches)
    fake = lambda rows: fake_int4(rows, group_ranges(rows, 128))  # noqa: E731
    ours = search_scale([weight], mean, [moments], [fake], group=128)
    assert ours.alpha == pytest.approx(theirs.awq_lite.best_alpha)
    torch.testing.assert_close(ours.scale, theirs.awq_lite.best_scale, rtol=1e-6, atol=0)
    errors = torch.tensor(list(theirs.awq_lite.loss.values()))
    factor = 96 * 64  # theirs are means over outputs and tokens, summed over batches
    tolerance = 1e-5 if dtype == torch.float32 else 0.03  # theirs are differences of outputs in bf16
    torch.testing.assert_close(ours.errors[1:].float() / factor, errors, rtol=tolerance, atol=0)
    applied = ours.smoothing(dtype)
    assert torch.equal(theirs.input_quantizer.pre_quant_scale.flatten(), applied.pre_quant_scale)
    assert torch.equal(theirs.weight, smoothed_weight(weight, applied.smooth))


def test_awq_clip_ranges() -> None:
    weight, x = weights(96, 256), batches_of(torch.float32)[0]
    theirs = reference(weight, [x], mtq.INT4_AWQ_CFG, method="awq_clip")
    ours, _ = clip(weight, diagonal_blocks(second_moments(x), 128), fake_int4, group=128)
    torch.testing.assert_close(ours.absmax, theirs.weight_quantizer.amax.float().reshape(96, 2))


@DTYPES
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_smoothquant_scales(dtype: torch.dtype, alpha: float) -> None:
    weight, batches = weights(96, 256, dtype=dtype), batches_of(dtype)
    theirs = reference(weight, batches, mtq.INT8_SMOOTHQUANT_CFG, method="smoothquant", alpha=alpha)
    channels = torch.stack([x.float().abs().amax(dim=0) for x in batches]).amax(dim=0)
    ours = smoothing(channels, [column_absmax(weight)], alpha)
    assert torch.equal(theirs.input_quantizer.pre_quant_scale.flatten(), ours.pre_quant_scale)
    assert torch.equal(theirs.weight, smoothed_weight(weight, ours.smooth))
    assert torch.equal(theirs.input_quantizer.amax.float(), ours.input_absmax(channels))


def test_mse_ranges_under_the_multipliers_of_the_reference() -> None:
    weight = weights(96, 256)
    theirs = reference(weight, batches_of(torch.float32), mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, method="mse")
    multipliers = torch.linspace(0.25, 4.0, steps=39).tolist()
    ours, _ = mse_ranges(weight, 128, fake_int4, multipliers)
    torch.testing.assert_close(ours.absmax, theirs.weight_quantizer.amax.float().reshape(96, 2))


def test_percentile_and_mse_of_histograms_to_their_bins() -> None:
    x = inputs(500, 256, seed=2)
    calibrator = HistogramCalibrator(num_bits=8, axis=None)
    calibrator.collect(x)
    ours, bins = histogram(x), x.abs().max().item() / 2048
    for percent in (90.0, 99.0, 99.9, 99.99):
        theirs = calibrator.compute_amax("percentile", percentile=percent).item()
        assert ours.percentile(percent).item() == pytest.approx(theirs, abs=2 * bins)
    theirs = calibrator.compute_amax("mse")
    costs = [(fake_int8(x, limit) - x).square().sum().item() for limit in (ours.mse(fake_int8, stride=2), theirs)]
    assert costs[0] <= 1.001 * costs[1]


@pytest.mark.parametrize("width", [64, 300])
def test_gptq_codes_under_known_ranges(width: int) -> None:
    rows, moments = weights(48, width, seed=3), second_moments(inputs(600, width))
    grid = int4(group_ranges(rows, width))
    theirs = rows.clone()
    inverse = compute_hessian_inverse(moments.clone(), theirs, 0.01)
    gptq_blockwise_update(theirs, inverse, 128, lambda w: grid.values(grid.codes(w, 0), 0))
    ours = solve(rows, prepare(moments), int4, group=width, ranges=group_ranges(rows, width))
    same = (grid.values(ours.codes, 0) == theirs).all(dim=1)
    assert same.float().mean() > 0.9  # a rare tie is broken unlike, and changes the rest of its row
