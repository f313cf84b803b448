"""E2M1 numbers, the four bit floats of NVFP4 and MXFP4: rounding to codes, and two codes a byte. Pure functions.

    code        0  1   2  3    4  5  6  7      8 to 15: the same, negative
    magnitude   0  .5  1  1.5  2  3  4  6

Values are rounded by two rules: `nearest`, in which a tie goes to the even code and a zero has no sign, and
`nearest_down`, in which a tie goes to the smaller magnitude and what is zero is negative (code 8), because that is
how nvidia-modelopt writes MXFP4 (quantization/qtensor/mxfp4_tensor.py of 0.47).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MAX = 6.0
#: The value of each code. Code 8, a negative number that became zero, has no sign here, as in the references.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nearest(x: Tensor) -> Tensor:
    """uint8 codes, one a byte, of fp32 numbers, which are overwritten; saturating.

    The code of a magnitude is the least of three roundings: to halves below 2, to ones below 4, to twos above. Each
    rounds ties to even, and the codes of even multiples are even. -0.0 is not negative: its code is 0.
    """
    x.clamp_(-MAX, MAX)
    sign = x.floor().to(torch.int8).bitwise_and_(8)  # floor: -0.1 is negative too. Faster than `< 0`.
    magnitude = x.abs_()
    code = (magnitude * 2).round_()
    torch.minimum(code, magnitude.round().add_(2), out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4), out=code)
    return code.to(torch.int8).add_(sign).view(torch.uint8)


def nearest_down(x: Tensor) -> Tensor:
    """As `nearest`, but ties go to the smaller magnitude, and the code of 0.0 and of -0.0 is 8.

    `ceil(x - 1/2)` rounds so; the subtraction is exact where it matters, near the ties.
    """
    x.clamp_(-MAX, MAX)
    sign = x.ceil().sub_(1).to(torch.int8).bitwise_and_(8)  # negative for 0.0 too
    magnitude = x.abs_()
    code = (magnitude * 2).sub_(0.5).ceil_()
    torch.minimum(code, (magnitude - 0.5).ceil_().add_(2), out=code)
    torch.minimum(code, magnitude.mul_(0.5).sub_(0.5).ceil_().add_(4), out=code)
    return code.to(torch.int8).add_(sign).view(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the even column low: uint8 [n, width] -> [n, width / 2]."""
    pairs = codes.view(torch.int16)  # low byte: even column. One wide operation instead of two strided ones.
    return (pairs | pairs >> 4).to(torch.uint8)


def unpack(packed: Tensor, values: Sequence[float] = VALUES) -> Tensor:
    """fp32 [..., width] values of packed codes uint8 [..., width / 2]; `values` are those of the 16 codes."""
    pairs = torch.tensor([(values[byte & 15], values[byte >> 4]) for byte in range(256)], device=packed.device)
    # Both values of a byte are fetched as one number.
    both = pairs.view(torch.int64).flatten().index_select(0, packed.reshape(-1).int())
    return both.view(torch.float32).reshape(*packed.shape[:-1], 2 * packed.shape[-1])
