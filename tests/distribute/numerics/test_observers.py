"""Absmax and non-finite counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distribute.numerics.observers import BLOCK, NonFinite, absmax, count_nonfinite, merge, rows_absmax

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(values=st.lists(st.floats(-60000, 60000), max_size=20))
def test_absmax_is_the_exact_largest_magnitude(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values).to(dtype)
    found = absmax(x)
    assert found.dtype == torch.float32
    assert found.shape == ()
    assert found.item() == max((abs(value) for value in x.tolist()), default=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_absmax_of_more_than_one_block(dtype: torch.dtype) -> None:
    weight = torch.randn(2 * BLOCK // 1024 + 5, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = rows_absmax(weight)
    assert found.dtype == torch.float32
    assert found.tolist() == [max(abs(value) for value in row) for row in weight.tolist()]
    assert found.max() == absmax(weight)


def test_rows_absmax_of_nothing() -> None:
    assert rows_absmax(torch.zeros(0, 4)).shape == (0,)
    assert rows_absmax(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]


@given(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=30), st.data())
def test_merging_parts_in_any_grouping_gives_the_absmax_of_the_whole(values: list[float], data) -> None:
    cut = data.draw(st.integers(1, len(values) - 2))
    cut2 = data.draw(st.integers(cut, len(values) - 1))
    x = torch.tensor(values)
    a, b, c = absmax(x[:cut]), absmax(x[cut:cut2]), absmax(x[cut2:])
    assert merge(merge(a, b), c).equal(absmax(x))
    assert merge(a, merge(c, b)).equal(absmax(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_values_are_counted_and_the_first_is_located(dtype: torch.dtype) -> None:
    x = torch.ones(4, 5).to(dtype)
    assert count_nonfinite(x) == NonFinite(0, 0, None)
    x[3, 0] = float("nan")
    x[1, 2] = float("-inf")
    x[2, 4] = float("inf")
    assert count_nonfinite(x) == NonFinite(nan=1, inf=2, first=(1, 2))


def test_an_empty_tensor_has_no_non_finite_value() -> None:
    assert count_nonfinite(torch.zeros(0, 3)) == NonFinite(0, 0, None)


def test_nan_shows_in_the_absmax() -> None:
    x = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    assert absmax(x).isnan()
    assert rows_absmax(x).isnan().tolist() == [True, False]
