"""Second moments and the cost of a change."""

import pytest
import torch

from distribute.numerics.moments import (
    ROWS,
    check_moments,
    diagonal_blocks,
    in_row_blocks,
    output_error,
    second_moments,
)
from tests.distribute.numerics.grids import inputs


def test_moments_of_parts_add_up() -> None:
    x = inputs(300, 24).to(torch.bfloat16)
    whole = second_moments(x.reshape(3, 100, 24))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(second_moments(x[:70]) + second_moments(x[70:]), whole, rtol=1e-5, atol=1e-4)


def test_the_cost_of_a_change_is_the_squared_error_of_the_outputs() -> None:
    x, delta = inputs(200, 32), torch.randn(3 * ROWS + 5, 32, generator=torch.Generator().manual_seed(0))
    error = output_error(delta, second_moments(x))
    assert error.dtype == torch.float64
    assert error.item() == pytest.approx((x.double() @ delta.double().T).square().sum().item(), rel=1e-5)


def test_costs_of_slices_of_rows_add_up() -> None:
    moments, delta = second_moments(inputs(200, 32)), torch.ones(100, 32)
    parts = output_error(delta[:30], moments) + output_error(delta[30:], moments)
    assert parts.item() == pytest.approx(output_error(delta, moments).item())
    assert output_error(delta[:0], moments).item() == 0


def test_diagonal_blocks_are_the_moments_of_each_group() -> None:
    x = inputs(200, 32)
    blocks = diagonal_blocks(second_moments(x), 8)
    assert blocks.shape == (4, 8, 8)
    for index in range(4):
        own = second_moments(x[:, index * 8 : index * 8 + 8])
        torch.testing.assert_close(blocks[index], own, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n", [1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS])
def test_every_product_is_of_one_shape(n: int) -> None:
    shapes = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(a.shape))
        return a @ b

    rows, other = torch.randn(n, 16), torch.randn(16, 3)
    torch.testing.assert_close(in_row_blocks(product, rows, other), rows @ other)
    assert set(shapes) == {(ROWS, 16)}


def test_moments_that_overflowed_are_refused() -> None:
    moments = torch.eye(3)
    check_moments(moments, 3)
    moments[0, 1] = float("inf")
    with pytest.raises(ValueError, match="overflowed"):
        check_moments(moments, 3)
