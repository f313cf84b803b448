"""Packing of integer codes against shifts written out, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distribute.numerics import packing


def test_an_odd_number_of_rows_has_no_pairs() -> None:
    with pytest.raises(ValueError, match="in pairs"):
        packing.pack_row_pairs(torch.zeros(3, 128, dtype=torch.int8))


def test_row_pairs_are_those_of_the_reference() -> None:
    codes = torch.tensor([[-8, 7], [-4, -1]], dtype=torch.int8)
    assert packing.pack_row_pairs(codes).tolist() == [[0xC8, 0xF7]]


@given(bits=st.sampled_from([4, 8]), n=st.integers(1, 5), k=st.integers(1, 40), seed=st.integers(0, 1 << 30))
def test_words_hold_every_code_and_come_back(bits: int, n: int, k: int, seed: int) -> None:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-half, half, (n, k), dtype=torch.int8, generator=generator)
    words = packing.pack_words(codes, bits)
    per = 32 // bits
    for i in range(n):
        for word in range(words.shape[1]):
            part = codes[i, word * per : (word + 1) * per].tolist()
            assert words[i, word].item() & 0xFFFFFFFF == sum((c + half) << (bits * j) for j, c in enumerate(part))
    assert torch.equal(packing.unpack_words(words, bits, k), codes)


@given(n=st.integers(1, 5), k=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_row_pairs_come_back(n: int, k: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (2 * n, k), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(packing.unpack_row_pairs(packing.pack_row_pairs(codes)), codes)


@pytest.mark.parametrize("shape", [(8, 1), (1, 8), (1, 1), (9, 3)])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_a_transposed_matrix_are_packed_whatever_its_strides(shape: tuple[int, int], bits: int) -> None:
    codes = torch.arange(shape[0] * shape[1], dtype=torch.int8).remainder(8).reshape(shape)
    words = packing.pack_words(codes.T, bits)
    assert torch.equal(words, packing.pack_words(codes.T.clone(memory_format=torch.contiguous_format), bits))
    stored = words.T.clone(memory_format=torch.contiguous_format)
    assert torch.equal(packing.unpack_words(stored.T, bits, shape[0]), codes.T)
