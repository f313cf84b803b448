"""Sizes in bytes as people write them: "5GB" (decimal) or "5GiB" (binary), in and out."""

import re

from distribute.errors import RecipeError

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Bytes meant by `text`, for example "5GB" -> 5_000_000_000.

    Raises:
        RecipeError: not a positive number followed by a known unit.
    """
    found = _SIZE.fullmatch(text)
    unit = found[2].upper() if found else ""
    if found and unit in UNITS:
        size = int(float(found[1]) * UNITS[unit])
        if size > 0:
            return size
    raise RecipeError(f"{text!r} is not a size; write a number above 0 and a unit, like 5GB, 500MB or 2GiB")


def format_size(size: float) -> str:
    """`size` bytes in decimal units, for example 1_234_000 -> "1.23 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"
