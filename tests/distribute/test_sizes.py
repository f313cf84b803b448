import pytest

from distribute.errors import RecipeError
from distribute.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("2GiB", 2 * 2**30),
        ("1.5 kib", 1536),
        ("100000", 100_000),
        (" 1tb ", 10**12),
    ],
)
def test_units_are_decimal_or_binary(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5GB", "0", "5 elephants", "1e9", "5GB5", "nan"])
def test_nonsense_is_refused_with_examples(text: str) -> None:
    with pytest.raises(RecipeError, match="is not a size; write a number above 0 and a unit, like 5GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1_234_000, "1.23 MB"), (5e9, "5 GB"), (2.5e15, "2500 TB")]
)
def test_sizes_are_written_in_decimal_units(size: float, text: str) -> None:
    assert format_size(size) == text
