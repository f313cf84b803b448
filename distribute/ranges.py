"""Ranges that leave something out: of the inputs of a linear layer by their histogram, of its weight by groups.

For algorithms that choose ranges alone. What has no range to choose (formats with a fixed scale, inputs that are
scaled at run time) keeps the largest magnitude.
"""

from torch import Tensor

from distribute.linear import Linear
from distribute.numerics.codec import Ranges
from distribute.numerics.search import FakeUnder, fake_e4m3, fake_int8, mse_ranges, percentile_ranges

#: Algorithms that choose ranges, and need no more of the inputs than how often they are how large.
RANGING = ("percentile", "mse")
_FAKES: dict[str, FakeUnder] = {"fp8": fake_e4m3, "int8": fake_int8}


def input_range(linear: Linear) -> Tensor:
    """fp32 0-dim: what the range of the inputs is taken for; of inputs that were seen."""
    assert linear.moments is not None and linear.scheme.inputs is not None
    histogram, algorithm = linear.moments.histogram, linear.algorithm
    if histogram is not None and algorithm.name == "percentile":
        return histogram.percentile(algorithm.percentile)
    if histogram is not None and algorithm.name == "mse" and linear.scheme.inputs.format in _FAKES:
        return histogram.mse(_FAKES[linear.scheme.inputs.format])
    return linear.moments.absmax.amax()


def weight_ranges(linear: Linear, rows: slice) -> Ranges | None:
    """Ranges of the groups of these rows; None where the largest magnitude stays."""
    weight, algorithm = linear.smoothed[rows], linear.algorithm
    if not linear.has_free_ranges:
        return None
    if algorithm.name == "percentile":
        return percentile_ranges(weight, linear.group, algorithm.percentile)
    if algorithm.name == "mse":
        return mse_ranges(weight, linear.group, lambda own, ranges: linear.fake(own, linear.absmax, ranges))[0]
    return None
