"""Values of weights that a source stores in FP8 blocks or MXFP4: those that transformers loads."""

import itertools

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from distribute.numerics.dequantize import fp8_blocks, mxfp4_blocks
from tests.distribute.numerics.samples import raw

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def every_e4m3(rows: int, width: int) -> torch.Tensor:
    """All finite codes, in an order without a pattern."""
    codes = (torch.arange(rows * width) * 37 % 254).to(torch.uint8)
    return (codes + (codes >= 127)).view(torch.float8_e4m3fn).reshape(rows, width)


def scales(rows: int, width: int) -> torch.Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(1)) / 1000 + 1e-5


@EACH_DTYPE
def test_fp8_blocks_have_the_values_that_transformers_loads(dtype: torch.dtype) -> None:
    codes, scale = every_e4m3(384, 256), scales(3, 2)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scale, output_dtype=dtype)
    assert torch.equal(raw(fp8_blocks(codes, scale, dtype=dtype)), raw(theirs))


def test_any_rows_of_fp8_blocks_have_the_values_of_the_whole() -> None:
    codes, scale = every_e4m3(300, 200), scales(3, 2)
    whole = fp8_blocks(codes, scale)
    cuts = [0, 1, 127, 128, 129, 257, 300]
    parts = [fp8_blocks(codes[a:b], scale, first=a) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_the_last_blocks_may_be_cut_short() -> None:
    codes, scale = every_e4m3(130, 129), scales(2, 2)
    expected = codes.float() * scale.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :129]
    assert torch.equal(fp8_blocks(codes, scale), expected.to(torch.bfloat16))


def test_scales_may_be_powers_of_two_in_their_own_dtype() -> None:
    codes, exponents = every_e4m3(128, 128), torch.tensor([[0.25]]).to(torch.float8_e8m0fnu)
    assert torch.equal(fp8_blocks(codes, exponents, dtype=torch.float32), codes.float() / 4)


@EACH_DTYPE
def test_mxfp4_has_the_values_that_transformers_loads(dtype: torch.dtype) -> None:
    """Every byte of two codes under every exponent but NaN: two experts of [rows, groups, 16]."""
    blocks = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(2, 2, 4, 16)
    for exponent in range(255):
        exponents = torch.full((2, 2, 4), exponent, dtype=torch.uint8)
        ours = mxfp4_blocks(blocks, exponents, dtype=dtype)
        theirs = convert_moe_packed_tensors(blocks, exponents, dtype=dtype).transpose(1, 2)
        assert ours.shape == (2, 2, 128)
        assert torch.equal(raw(ours), raw(theirs)), exponent


def test_each_mxfp4_row_stands_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(100, 140, (3, 5, 2), generator=generator, dtype=torch.uint8)
    whole = mxfp4_blocks(blocks, exponents)
    for expert, row in itertools.product(range(3), range(5)):
        assert torch.equal(raw(mxfp4_blocks(blocks[expert, row], exponents[expert, row])), raw(whole[expert, row]))
