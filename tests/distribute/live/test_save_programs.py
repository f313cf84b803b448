"""Models that transformers itself cuts over ranks while it loads them: fused experts come in strided shards."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distribute import distributed_save_hf_checkpoint
from tests.models import make_model
from tests.torchrun import run_ranks

KINDS = ("llama", "qwen3_moe", "mixtral")


def saves(folder: str) -> list[str]:
    """Load and save each kind; the kinds of placement that were met."""
    dist.init_process_group("gloo")
    placements = set()
    for kind in KINDS:
        model = AutoModelForCausalLM.from_pretrained(Path(folder, kind), tp_plan="auto", dtype="auto")
        placements |= {str(getattr(tensor, "placements", None)) for tensor in model.state_dict().values()}
        distributed_save_hf_checkpoint(model, Path(folder, f"{kind}-saved"), 448.0, None)
    dist.destroy_process_group()
    return sorted(placements)


def test_a_model_comes_back_as_it_was_loaded(tmp_path: Path) -> None:
    for kind in KINDS:
        make_model(kind, tmp_path / kind)
    (placements, _) = run_ranks(saves, 2, str(tmp_path))
    assert any("_StridedShard" in placement for placement in placements)
    for kind in KINDS:
        loaded, saved = (load_file(tmp_path / name / "model.safetensors") for name in (kind, f"{kind}-saved"))
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in loaded)
