"""Live models for tests of the live export: tiny, random, the same on every rank, and placed in every way DTensor has.

    model = make_live("qwen3_moe")          # whole, on this rank
    place(model, "fsdp_tp", world)          # in place: parameters become DTensors

`PLACEMENTS` says from which world size on a placement makes sense.
"""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import KINDS

ODD_HIDDEN = 40  # not divisible by 3, so shards are uneven


def make_live(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **config: object) -> PreTrainedModel:
    """A tiny model with random weights, vectors included, built from a config on this rank."""
    values = {
        "vocab_size": 97, "hidden_size": ODD_HIDDEN, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "initializer_range": 0.08,
    }  # fmt: skip
    if kind == "mixtral":
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(KINDS[kind](**(values | config)), dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.08 + (parameter.dim() == 1))
    return model.eval()


def place(model: torch.nn.Module, placement: str, world: int) -> None:
    """In place: shard a model over all ranks. Called by all ranks."""
    PLACEMENTS[placement][1](model, world)


def _fsdp(model: torch.nn.Module, world: int, mesh: DeviceMesh | None = None) -> None:
    mesh = mesh or init_device_mesh("cpu", (world,))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _hsdp(model: torch.nn.Module, world: int) -> None:
    _fsdp(model, world, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))


def _tp(model: torch.nn.Module, world: int, mesh: DeviceMesh | None = None) -> None:
    mesh = mesh or init_device_mesh("cpu", (world,))
    styles = {
        "q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel, "o_proj": RowwiseParallel,
        "gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel,
    }  # fmt: skip
    for layer in _layers(model):
        linears = {name: styles[leaf] for name, module in layer.named_modules()
                   if (leaf := name.rpartition(".")[2]) in styles and type(module) is torch.nn.Linear}  # fmt: skip
        parallelize_module(layer, mesh, {name: style() for name, style in linears.items()})
        # torch's styles take plain linear layers only: quantized ones are cut by hand, in the same way.
        cut = {f"{name}.weight": Shard(0) if styles[leaf] is ColwiseParallel else Shard(1)
               for name, _ in layer.named_modules()
               if (leaf := name.rpartition(".")[2]) in styles and name not in linears}  # fmt: skip
        _distribute(layer, mesh, lambda name, tensor, cut=cut: cut.get(name))


def _fsdp_tp(model: torch.nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    _tp(model, world, mesh["tp"])
    _fsdp(model, world, mesh["dp"])


def _expert_parallel(model: torch.nn.Module, world: int) -> None:
    """Experts over pairs of ranks, each pair a replica of the others; everything else whole on each rank."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))["ep"]
    _distribute(model, mesh, lambda name, tensor: Shard(0) if ".experts." in name else None)


def _last(model: torch.nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    _distribute(model, mesh, lambda name, tensor: Shard(-1) if tensor.dim() > 1 else Replicate())


def _second(model: torch.nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    _distribute(model, mesh, lambda name, tensor: Shard(1) if tensor.dim() > 1 else Shard(0))


def _replicate(model: torch.nn.Module, world: int) -> None:
    _distribute(model, init_device_mesh("cpu", (world,)), lambda name, tensor: Replicate())


def _mixed(model: torch.nn.Module, world: int) -> None:
    """Another placement for each parameter in turn, and some plain tensors between."""
    mesh = init_device_mesh("cpu", (world,))
    kinds = [Shard(0), None, Shard(-1), Replicate()]
    turns = {name: kinds[turn % 4] for turn, (name, _) in enumerate(model.named_parameters())}
    _distribute(model, mesh, lambda name, tensor: turns[name])


def _plain(model: torch.nn.Module, world: int) -> None:
    """Whole on every rank."""


#: name -> (smallest world, in-place placement)
PLACEMENTS: dict[str, tuple[int, Callable[[torch.nn.Module, int], None]]] = {
    "plain": (1, _plain), "replicate": (1, _replicate), "fsdp": (1, _fsdp), "tp": (1, _tp), "last": (1, _last),
    "second": (1, _second), "mixed": (1, _mixed), "hsdp": (4, _hsdp), "fsdp_tp": (4, _fsdp_tp),
    "expert_parallel": (4, _expert_parallel),
}  # fmt: skip


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.model.layers)  # type: ignore[union-attr, arg-type]


def _distribute(
    model: torch.nn.Module, mesh: DeviceMesh, choose: Callable[[str, torch.Tensor], Shard | Replicate | None]
) -> None:
    for name, parameter in list(model.named_parameters()):
        placement = choose(name, parameter)
        if placement is None:
            continue
        owner, _, leaf = name.rpartition(".")
        # Not distribute_tensor with a broadcast: the whole tensor is on every rank already.
        placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        assert isinstance(placed, DTensor)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(placed, requires_grad=False))
