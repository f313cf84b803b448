"""Ranges that an algorithm picks instead of the largest magnitude: of weights by groups, of activations by histogram.

`percentile` leaves a fraction of the values outside; `mse` shrinks the range to where coding costs least. A group is
`group` columns of one row; a whole row where group is the width. Formulas follow nvidia-modelopt 0.47
(quantization/calib/mse.py, histogram.py), with these differences: the multipliers here include 1.0 and do not exceed
it, so that the result is never worse than the largest magnitude; the bins of a histogram are powers of two wide, so
that it does not depend on the order of the values; a percentile is the upper edge of its bin, not the lower one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.numerics.codec import Ranges
from distribute.numerics.observers import absmax

#: 1.0 down to 0.25. The first of equals is taken, so a range shrinks only where that helps.
MULTIPLIERS = tuple(1.0 - step / 40 for step in range(31))
#: Bins of a histogram. At least half of them are below the largest magnitude.
BINS = 4096
#: Magnitudes below 2 ** (LEAST - 12) share the first bin.
LEAST = -100

#: Codes and decodes rows [n, in] under ranges: fp32 [n, in].
FakeInRanges = Callable[[Tensor, Ranges], Tensor]
#: Codes and decodes float values of any shape under an absmax fp32 0-dim: fp32.
FakeUnder = Callable[[Tensor, Tensor], Tensor]


def split_groups(rows: Tensor, group: int) -> Tensor:
    """[n, groups, group] of rows [n, in].

    Raises:
        ValueError: the rows are not whole groups.
    """
    if group < 1 or rows.shape[1] % group:
        raise ValueError(f"rows of {rows.shape[1]} input features are not whole groups of {group}")
    return rows.unflatten(1, (rows.shape[1] // group, group))


def group_ranges(rows: Tensor, group: int) -> Ranges:
    """Least and largest value of each group of finite float rows [n, in], zero included: fp32 [n, groups]."""
    low, high = torch.aminmax(split_groups(rows, group), dim=2)
    return Ranges(low.to(torch.float32).clamp_(max=0.0), high.to(torch.float32).clamp_(min=0.0))


def percentile_ranges(rows: Tensor, group: int, percent: float) -> Ranges:
    """Ranges that hold at least `percent` of the magnitudes of each group: exact, by order.

    Raises:
        ValueError: `percent` is not in (0, 100]; the rows are not whole groups.
    """
    count = _count(group, percent)
    limit = split_groups(rows, group).abs().kthvalue(count, dim=2).values.to(torch.float32)
    ranges = group_ranges(rows, group)
    return Ranges(torch.maximum(ranges.low, -limit), torch.minimum(ranges.high, limit))


def mse_ranges(
    rows: Tensor, group: int, fake: FakeInRanges, multipliers: Sequence[float] = MULTIPLIERS
) -> tuple[Ranges, Tensor]:
    """Ranges that minimise the squared error of coding each group of finite rows [n, in].

    Returns:
        The ranges, and fp32 [n, groups]: the multiplier that made each.
    """
    return best_ranges(rows, group, fake, lambda delta: delta.square_().sum(dim=2), multipliers)


def best_ranges(
    rows: Tensor,
    group: int,
    fake: FakeInRanges,
    cost: Callable[[Tensor], Tensor],
    multipliers: Sequence[float] = MULTIPLIERS,
) -> tuple[Ranges, Tensor]:
    """As `mse_ranges` with any `cost` of the change fp32 [n, groups, group] -> [n, groups]."""
    whole = group_ranges(rows, group)
    values = rows.to(torch.float32)
    best = torch.full_like(whole.low, math.inf)
    chosen = torch.ones_like(whole.low)
    for multiplier in multipliers:
        coded = fake(rows, Ranges(whole.low * multiplier, whole.high * multiplier))
        costs = cost(split_groups(coded - values, group))
        better = costs < best
        best = torch.where(better, costs, best)
        chosen = torch.where(better, torch.full_like(chosen, multiplier), chosen)
    return Ranges(whole.low * chosen, whole.high * chosen), chosen


def first_least(costs: Tensor) -> int:
    """Index of the first of the least costs [n]; NaN is never the least.

    Raises:
        ValueError: every cost is NaN.
    """
    values = [math.inf if math.isnan(cost) else cost for cost in costs.tolist()]
    if all(math.isinf(value) for value in values):
        raise ValueError("no candidate has a finite cost: the weight or the inputs are not finite")
    return min(range(len(values)), key=values.__getitem__)


@dataclass(frozen=True)
class Histogram:
    """Magnitudes of activations: int64 [BINS] counts of equal bins from 0 to 2 ** exponent, and the largest (fp32).

    The exponent is the least that holds every magnitude, so a histogram follows from the values alone: the parts of
    a tensor merge in any order and grouping to the histogram of the whole.
    """

    counts: Tensor
    exponent: int
    largest: Tensor

    def merge(self, other: "Histogram") -> "Histogram":
        """The histogram of the values of both."""
        exponent = max(self.exponent, other.exponent)
        counts = self._counts_up_to(exponent) + other._counts_up_to(exponent)
        return Histogram(counts, exponent, torch.maximum(self.largest, other.largest))

    def percentile(self, percent: float) -> Tensor:
        """fp32 0-dim: an absmax that at least `percent` of the values do not exceed, to one bin; 0 of no values.

        Raises:
            ValueError: `percent` is not in (0, 100].
        """
        below = self.counts.cumsum(0)
        count = _count(int(below[-1]), percent)
        last = int(torch.searchsorted(below, count))
        return torch.full_like(self.largest, min(float(self.largest), (last + 1) * self._width))

    def mse(self, fake: FakeUnder, stride: int = 16, start: int = 128) -> Tensor:
        """fp32 0-dim: the absmax whose coding errs least on the centres of the bins, weighted by their counts.

        Candidates are the largest magnitude and the centre of every `stride`-th bin from `start` on.
        """
        centres = (torch.arange(BINS, device=self.counts.device) + 0.5).mul_(self._width).to(torch.float32)
        candidates = centres[start::stride]
        candidates = torch.cat((self.largest.reshape(1), candidates[candidates < self.largest]))
        used = self.counts > 0
        values, weights = centres[used], self.counts[used].to(torch.float64)
        costs = torch.stack([(fake(values, c) - values).double().square_() @ weights for c in candidates])
        return candidates[first_least(costs)]

    @property
    def _width(self) -> float:
        return math.ldexp(1.0, self.exponent) / BINS

    def _counts_up_to(self, exponent: int) -> Tensor:
        """The counts when the last bin ends at 2 ** exponent: each doubling joins pairs of bins, exactly."""
        joined = 1 << min(exponent - self.exponent, BINS.bit_length() - 1)
        counts = self.counts.unflatten(0, (-1, joined)).sum(dim=1)
        return torch.cat((counts, counts.new_zeros(BINS - counts.shape[0])))


def histogram(x: Tensor) -> Histogram:
    """The histogram of the magnitudes of a float tensor of any shape.

    Raises:
        ValueError: a value is not finite.
    """
    largest = absmax(x)
    if not bool(largest.isfinite()):
        raise ValueError("activations that are not finite have no histogram")
    exponent = max(LEAST, math.frexp(float(largest))[1]) if largest > 0 else LEAST
    # exact: the product with a power of two, and the cut to a whole number
    bins = x.detach().reshape(-1).to(torch.float32).abs().mul_(math.ldexp(BINS, -exponent)).to(torch.int32)
    return Histogram(torch.bincount(bins, minlength=BINS), exponent, largest)


def fake_e4m3(values: Tensor, largest: Tensor) -> Tensor:
    """fp32: float values coded as e4m3 under an absmax and decoded again."""
    scale = (largest / 448.0).clamp_(min=torch.finfo(torch.float32).tiny)
    return (values.to(torch.float32) / scale).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32) * scale


def fake_int8(values: Tensor, largest: Tensor) -> Tensor:
    """fp32: float values coded as symmetric int8 under an absmax and decoded again."""
    scale = (largest / 127.0).clamp_(min=torch.finfo(torch.float32).tiny)
    return (values.to(torch.float32) / scale).round_().clamp_(-128, 127) * scale


def _count(total: int, percent: float) -> int:
    """How many of so many values are `percent` of them, at least one."""
    if not 0 < percent <= 100:
        raise ValueError(f"a percentile is above 0 and at most 100, not {percent}")
    return max(1, math.ceil(total * percent / 100))
