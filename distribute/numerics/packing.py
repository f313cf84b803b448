"""Integer codes in dense words: pairs of rows in bytes (modelopt), or along a row in 32 bits (compressed-tensors).

    row pairs   byte = (even row & 15) | (odd row << 4)         nvidia-modelopt 0.47, export/quant_utils.py
    words       codes + 2 ** (bits - 1), least significant bits first; the last word is filled up with zero bits
                compressed-tensors 0.20.1, compressors/pack_quantized/helpers.py

Words are those of a little-endian machine, as everything in a checkpoint.
"""

from math import ceil

import torch
from torch import Tensor


def pack_row_pairs(codes: Tensor) -> Tensor:
    """uint8 [n / 2, in] of int8 codes [n, in] within -8 and 7.

    Raises:
        ValueError: the number of rows is odd.
    """
    if codes.shape[0] % 2:
        raise ValueError(f"rows are stored in pairs, but the weight has {codes.shape[0]} output features")
    even, odd = codes[0::2], codes[1::2]
    return ((even & 15) | (odd << 4)).view(torch.uint8)


def unpack_row_pairs(packed: Tensor) -> Tensor:
    """int8 [2 n, in] of uint8 [n, in]."""
    both = packed.view(torch.int8)
    return torch.stack((both << 4 >> 4, both >> 4), dim=1).flatten(0, 1)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """int32 [n, ceil(k * bits / 32)] of int8 codes [n, k] of 4 or 8 bits."""
    assert bits in (4, 8), bits
    per = 32 // bits
    n, k = codes.shape
    unsigned = _plain(codes).view(torch.uint8) + (1 << (bits - 1))  # wraps around as wanted
    if missing := ceil(k / per) * per - k:
        unsigned = torch.cat((unsigned, unsigned.new_zeros(n, missing)), dim=1)
    if bits == 4:
        pairs = unsigned.view(torch.int16)  # low byte: even column. One wide operation instead of two strided ones.
        unsigned = (pairs | pairs >> 4).to(torch.uint8)
    return unsigned.view(torch.int32)


def unpack_words(words: Tensor, bits: int, k: int) -> Tensor:
    """int8 [n, k] of int32 [n, ceil(k * bits / 32)]."""
    assert bits in (4, 8), bits
    unsigned = _plain(words).view(torch.uint8)
    if bits == 4:
        unsigned = torch.stack((unsigned & 15, unsigned >> 4), dim=2).flatten(1)
    return (unsigned[:, :k] - (1 << (bits - 1))).view(torch.int8)


def _plain(x: Tensor) -> Tensor:
    """[n, k] with the strides k and 1, without which bytes are not viewed as words or back.

    `contiguous` alone leaves any stride to an axis of one element.
    """
    return x.reshape(-1).view(x.shape)
