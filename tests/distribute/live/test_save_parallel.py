"""Models as programs hold them when they save: offloaded, in training, on meshes of three axes, of odd storage.

Each is made twice by the same function: whole, and placed on the ranks. The export of both is the same.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import PreTrainedModel

from distribute import distributed_save_hf_checkpoint
from distribute.tensors import to_bytes
from tests.distribute.live.saved import digests
from tests.distribute.live.test_save_bytes import Bag, assert_holds, load
from tests.distribute.live.test_save_placements import state_digest
from tests.live_models import make_live, place
from tests.torchrun import run_ranks

SHARD = "40KB"
TOKENS = torch.arange(8)[None]


def sharded(model: nn.Module, world: int, **policies: Any) -> nn.Module:
    """With FSDP2; whole when `world` is 0."""
    if world:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, **policies)
        fully_shard(model, mesh=mesh, **policies)
    return model


def offloaded(world: int) -> nn.Module:
    return sharded(make_live("llama"), world, offload_policy=CPUOffloadPolicy(pin_memory=False))


def mixed_precision(world: int) -> nn.Module:
    """Computes in bf16, keeps fp32: what is kept is written."""
    model = make_live("llama", dtype=torch.float32)
    return sharded(model, world, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def in_training(world: int) -> nn.Module:
    """With gradients, between backward and step."""
    model = sharded(make_live("llama", dtype=torch.float32), world).train()
    if world:
        model(input_ids=TOKENS).logits.sum().backward()
    return model


def gathered(world: int) -> nn.Module:
    """After a forward that left whole parameters in the place of the shards."""
    model = sharded(make_live("llama"), world, reshard_after_forward=False)
    if world:
        with torch.no_grad():
            model(input_ids=TOKENS)
    return model


def of_inference(world: int) -> nn.Module:
    """Made in inference mode, saved out of it."""
    with torch.inference_mode():
        model = make_live("qwen3_moe")
        if world:
            place(model, "mixed", world)
    return model


def mixed_dtypes(world: int) -> nn.Module:
    """bf16, fp16 and fp32 side by side, in DTensors and plain tensors, whole rows and parts of rows."""
    model = make_live("mixtral")
    for layer in model.model.layers:
        layer.input_layernorm.float()
        layer.self_attn.q_proj.half()
        layer.mlp.gate.float()
    if world:
        place(model, "mixed", world)
    return model


def three_axes(world: int) -> nn.Module:
    """HSDP over tensor parallelism; with three ranks all of it is replicated."""
    model = make_live("llama")
    if not world:
        return model
    shape = (1, 2, 2) if world == 4 else (world, 1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    for layer in model.model.layers:
        styles = {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        parallelize_module(layer, mesh["tp"], styles)
        fully_shard(layer, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return model


class Shared(nn.Module):
    """One weight under two names, a transposed one, a slice of a larger storage, an expanded and a passing buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(48, 40, bias=False) for _ in range(4))
        self.a.weight = self.b.weight = nn.Parameter(torch.randn(40, 48, generator=generator))
        self.c.weight = nn.Parameter(torch.randn(48, 40, generator=generator).t())
        self.d.weight = nn.Parameter(torch.randn(400, 48, generator=generator)[40:80])
        self.register_buffer("e", torch.randn(1, 48, generator=generator).expand(40, 48))
        self.register_buffer("passing", torch.zeros(3), persistent=False)


def shared_storage(world: int) -> nn.Module:
    model = Shared()
    if world:  # FSDP takes contiguous parameters only
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params={model.c.weight})
    return model


def odd_strides(world: int) -> nn.Module:
    """DTensors whose local parts are views: transposed, sliced, with a gap between rows or elements; and scalars."""
    whole = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    imaginary = torch.complex(whole, whole).conj().imag  # a view that torch negates when it is read
    tensors = {
        "columns": whole, "rows": whole, "gaps": whole, "negated": imaginary, "scalar": torch.tensor(2.5), "none": whole[:0],
    }  # fmt: skip
    if world:
        mesh = init_device_mesh("cpu", (world,))
        cut = {dim: distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None) for dim in (0, 1)}
        local = cut[0].to_local()
        gaps = torch.zeros(len(local), 3, 16)[:, 1, ::2].copy_(local)
        tensors |= {
            "columns": cut[1][:], "rows": distribute_tensor(whole.T, mesh, [Shard(1)], src_data_rank=None).t(),
            "gaps": DTensor.from_local(gaps, mesh, [Shard(0)], run_check=False, shape=(9, 8), stride=(8, 1)),
            "negated": distribute_tensor(imaginary, mesh, [Shard(0)], src_data_rank=None),
            "scalar": distribute_tensor(torch.tensor(2.5), mesh, [Replicate()], src_data_rank=None),
            "none": distribute_tensor(whole[:0], mesh, [Shard(0)], src_data_rank=None),
        }  # fmt: skip
    return Bag(tensors)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    make.__name__: make
    for make in (
        offloaded, mixed_precision, in_training, gathered, of_inference, mixed_dtypes, three_axes, shared_storage,
        odd_strides,
    )
}  # fmt: skip


def facts(model: nn.Module) -> list[Any]:
    """What a save must leave as it is."""
    digest = state_digest(model)  # first: state_dict() itself puts the shards of FSDP back
    graph = [(name, value.requires_grad, value.grad is None, id(value)) for name, value in model.named_parameters()]
    return [digest, graph, model.training]


def saves(folder: str) -> None:
    dist.init_process_group("gloo")
    for name, make in MODELS.items():
        model = make(dist.get_world_size())
        before = facts(model)
        distributed_save_hf_checkpoint(model, Path(folder, name), 448.0, None, SHARD)
        assert facts(model) == before, name
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[3, 4])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    run_ranks(saves, request.param, str(folder))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_placed_model_becomes_what_the_whole_one_holds(name: str, saved: Path, tmp_path: Path) -> None:
    whole = MODELS[name](0)
    assert_holds(saved / name, content_of(whole, tmp_path / "reference"))
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=saved / name, check=True)
    distributed_save_hf_checkpoint(whole, tmp_path / "alone", 448.0, None, SHARD)
    assert digests(tmp_path / "alone") == digests(saved / name)


def content_of(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers writes; the state of a module that is not its own."""
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(folder)
        return load(folder)
    state = {name: tensor.resolve_neg() for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name != "b.weight"}  # which is a.weight


def test_views_cost_no_more_than_what_they_show(saved: Path) -> None:
    files = sum(path.stat().st_size for path in (saved / "shared_storage").glob("*.safetensors"))
    tensors = sum(len(to_bytes(tensor)) for tensor in load(saved / "shared_storage").values())
    assert files < 1.1 * tensors
    assert "passing" not in load(saved / "shared_storage")
