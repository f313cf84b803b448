"""A model on an accelerator gives the bytes that the same model gives on the CPU."""

from pathlib import Path

import pytest
import torch

from distribute import distributed_save_hf_checkpoint
from distribute.shards import sha256
from tests.live_models import make_live


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_device_changes_no_byte(kind: str, tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        distributed_save_hf_checkpoint(make_live(kind).to(device), tmp_path / device, 448.0, None, "50KB")
    assert digests(tmp_path / "cuda") == digests(tmp_path / "cpu")
