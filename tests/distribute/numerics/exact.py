"""Rounding in exact rational arithmetic, for slow references of the codecs."""

from fractions import Fraction

import torch

#: A binary format: significant bits, exponent of the least subnormal.
E4M3 = (4, -9)
E2M1 = (2, -1)
#: Those of the dtypes a weight may have.
FORMATS = {torch.float32: (24, -149), torch.bfloat16: (8, -133), torch.float16: (11, -24)}


def nearest(value: Fraction, binary_format: tuple[int, int]) -> Fraction:
    """Round a magnitude to the nearest number with so many significant bits, ties to even; unbounded above."""
    bits, least = binary_format
    if value == 0:
        return value
    magnitude = value.numerator.bit_length() - value.denominator.bit_length()
    if value < Fraction(2) ** magnitude:
        magnitude -= 1
    unit = Fraction(2) ** max(magnitude - bits + 1, least)
    return round(value / unit) * unit
