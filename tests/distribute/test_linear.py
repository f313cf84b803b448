"""A linear layer while it is solved: what it is with parameters, and what its inputs are then."""

import torch

from distribute.linear import Linear
from distribute.moments import Moments
from distribute.numerics.moments import second_moments
from distribute.scheme import PRESETS
from tests.toy_codec import GROUP, ToyCodec


def test_moments_are_those_of_the_smoothed_inputs() -> None:
    x, weight, smooth = torch.randn(50, 2 * GROUP), torch.randn(8, 2 * GROUP), torch.rand(2 * GROUP) + 0.5
    moments = Moments(50, x.abs().amax(dim=0), x.abs().mean(dim=0), second_moments(x))
    linear = Linear("m", weight, PRESETS["int4_awq"].scheme, ToyCodec(), moments)
    assert linear.input_moments() is moments.second
    smoothed = linear.with_parameters({"smooth": smooth, "row_scale": torch.full((8,), 2.0)})
    torch.testing.assert_close(smoothed.input_moments(), second_moments(x / smooth))
    torch.testing.assert_close(smoothed.smoothed, weight * 2 * smooth)
    assert torch.equal(smoothed.absmax, smoothed.smoothed.abs().amax())
    assert torch.equal(linear.smoothed, weight)


def test_rows_are_coded_as_in_the_whole() -> None:
    weight = torch.randn(16, 2 * GROUP)
    linear = Linear("m", weight, PRESETS["int4"].scheme, ToyCodec())
    codes = torch.randint(-8, 8, weight.shape, dtype=torch.int8)
    ends = {"low": -torch.rand(16, 2), "high": torch.rand(16, 2)}
    for parameters in ({}, ends, {**ends, "codes": codes}):
        own = linear.with_parameters(parameters)
        found = {name: value[4:10] for name, value in parameters.items()}
        assert torch.equal(own.coded()[4:10], own.coded(slice(4, 10)))
        assert torch.equal(own.coded()[4:10], linear.coded(slice(4, 10), found))
    assert not torch.equal(linear.coded(), linear.with_parameters(ends).coded())
