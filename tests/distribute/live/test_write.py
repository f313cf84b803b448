"""The writer of a live export: descriptors and offsets."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distribute import distributed_save_hf_checkpoint
from distribute.live.write import OPEN_FILES


@pytest.fixture
def files_beyond_limit() -> Iterator[int]:
    """A number of files that this process may not have open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + OPEN_FILES + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_checkpoint_may_have_more_files_than_a_process_may_open(files_beyond_limit: int, tmp_path: Path) -> None:
    model = nn.ParameterList(nn.Parameter(torch.tensor([float(number)])) for number in range(files_beyond_limit))
    distributed_save_hf_checkpoint(model, tmp_path / "out", 448.0, None, max_shard_size=1)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == files_beyond_limit
    assert {name: value.item() for file in files for name, value in load_file(file).items()} == {
        str(number): float(number) for number in range(files_beyond_limit)
    }
