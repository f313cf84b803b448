"""Rounding to four-bit floats against exact arithmetic, and two of them a byte."""

from fractions import Fraction

import pytest
import torch

from distribute.numerics.e2m1 import VALUES, nearest, nearest_down, pack, unpack
from tests.distribute.numerics.exact import E2M1
from tests.distribute.numerics.exact import nearest as exactly

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
MAGNITUDES = torch.tensor(VALUES[:8])


def slow_down(x: float) -> int:
    """As nvidia-modelopt counts: the cut points that lie below."""
    return sum(abs(x) > tie for tie in TIES.tolist()) | (x <= 0) << 3


def slow_nearest(x: float) -> int:
    return VALUES.index(float(min(exactly(abs(Fraction(x)), E2M1), Fraction(6)))) | (x < 0) << 3


def every_number() -> torch.Tensor:
    """Every finite bf16 number, and the fp32 neighbours of what rounding turns at."""
    bf16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    points = torch.cat([TIES, MAGNITUDES])
    around = torch.cat([points.nextafter(torch.tensor(9.0)), points.nextafter(torch.tensor(-9.0)), points])
    return torch.cat([bf16[bf16.isfinite()], around, -around])


@pytest.mark.parametrize(("fast", "slow"), [(nearest, slow_nearest), (nearest_down, slow_down)])
def test_every_number_gets_the_code_of_exact_arithmetic(fast, slow) -> None:
    numbers = every_number()
    assert fast(numbers.clone()).tolist() == [slow(x) for x in numbers.tolist()]


def test_the_rules_differ_in_ties_that_lie_below_an_even_code_and_in_zeros() -> None:
    assert nearest(TIES.clone()).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nearest_down(TIES.clone()).tolist() == [0, 1, 2, 3, 4, 5, 6]
    zeros = torch.tensor([0.0, -0.0])
    assert nearest(zeros.clone()).tolist() == [0, 0]
    assert nearest_down(zeros.clone()).tolist() == [8, 8]


def test_packing_puts_the_even_column_low_and_unpacking_gives_the_values() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    both = torch.stack([codes & 15, codes >> 4], dim=1).reshape(2, 256)
    packed = pack(both)
    assert torch.equal(packed.flatten(), codes)
    assert unpack(packed).flatten().tolist() == [VALUES[code] for code in both.flatten().tolist()]
