"""The models that other tests compare on: equal bits in every process, and what FSDP2 makes of them."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.oracle.modelopt_models import RECIPES, export_reference, make_quantized
from tests.torchrun import run_ranks

KINDS = ["llama", "qwen3_moe"]


def digest(state: dict[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        sha.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def digests_and_shards() -> dict[str, object]:
    """On each rank: the digest of every model, and whether sharding it keeps its state."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for kind in KINDS:
        for recipe in RECIPES:
            model = make_quantized(kind, recipe)
            whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            state = model.state_dict()
            kinds = {name: isinstance(tensor, DTensor) for name, tensor in state.items()}
            assert kinds == {name: not name.endswith("_amax") for name in whole}
            assert all(torch.equal(t.full_tensor(), whole[n]) for n, t in state.items() if isinstance(t, DTensor))
            found[f"{kind} {recipe}"] = digest(whole)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, str]]:
    return run_ranks(digests_and_shards, 2)


def test_every_rank_makes_the_same_models_and_can_shard_them(two_ranks: list[dict[str, str]]) -> None:
    first, second = two_ranks
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_with_more_threads_makes_the_models_of_the_ranks(
    kind: str, two_ranks: list[dict[str, str]]
) -> None:
    model = make_quantized(kind, "nvfp4_kv")
    assert digest(model.state_dict()) == two_ranks[0][f"{kind} nvfp4_kv"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_references_export_has_packed_weights_and_kv_scales(kind: str, tmp_path: Path) -> None:
    tensors = load_file(export_reference(make_quantized(kind, "nvfp4_kv"), tmp_path) / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.uint8
    assert tensors["model.layers.1.self_attn.k_proj.k_scale"].dtype == torch.float32
