"""Hidden states in memory and in files."""

from pathlib import Path

import pytest
import torch

from distribute.spill import Spill


@pytest.mark.parametrize("limit", [0, 100, 1 << 20])
def test_values_come_back_from_wherever_they_lie(limit: int, tmp_path: Path) -> None:
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "left over").write_bytes(b"x")
    states = Spill(folder, limit)
    assert not folder.exists(), "what a run before left is gone"
    values = [torch.randn(2, size, 8).bfloat16() for size in (1, 5, 2)]
    for value in values:
        states.append(value)
    assert len(states) == 3
    assert states.bytes_held <= limit
    assert all(torch.equal(states[index], value) for index, value in enumerate(values))
    states[1], states[2] = values[2], values[1]
    assert torch.equal(states[1], values[2])
    assert torch.equal(states[2], values[1])
    assert states.bytes_held <= limit
    assert folder.exists() == (limit < 1 << 20)
    states.close()
    assert not folder.exists()
