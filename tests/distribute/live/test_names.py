"""Names, shapes and rows on the Hub: for weights exactly what save_pretrained writes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import PreTrainedModel, Qwen3_5ForCausalLM
from transformers.core_model_loading import Concatenate, WeightConverter

from distribute.errors import UserError
from distribute.live.names import hub_module_names, hub_tensors
from tests.distribute.live.hub_models import MODELS, assemble, assert_same, make, saved, shapes_of, stored

EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    expected, state = saved(model, tmp_path / "made"), stored(model)
    assert_same(assemble(hub_tensors(model, shapes_of(state)), state), expected)

    loaded = type(model).from_pretrained(tmp_path / "made")
    expected, state = saved(loaded, tmp_path / "loaded"), stored(loaded)
    assert_same(assemble(hub_tensors(loaded, shapes_of(state)), state), expected)


def test_a_prefix_that_loading_removed_comes_back(tmp_path: Path) -> None:
    make("qwen3_5").save_pretrained(tmp_path / "source")
    text = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "source")
    expected, state = saved(text, tmp_path / "text"), stored(text)
    assert expected.keys().isdisjoint(name for name in state if ".layers." in name)
    assert_same(assemble(hub_tensors(text, shapes_of(state)), state), expected)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["mixtral", "gemma3", "llava", "gpt_neox"])
@pytest.mark.usefixtures("one_rank")
def test_sharding_changes_no_name(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    expected, state = saved(model, tmp_path), {name: tensor.clone() for name, tensor in stored(model).items()}
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)][:2]:
        parallelize_module(module, mesh["tp"], ColwiseParallel())
    for module in model.modules():
        if module is not model and isinstance(module, PreTrainedModel):
            fully_shard(module, mesh=mesh["dp"])  # models inside the model lose their class names as well
    fully_shard(model, mesh=mesh["dp"])
    assert type(model).__name__.startswith("FSDP")
    assert_same(assemble(hub_tensors(model, shapes_of(stored(model))), state), expected)


def unpack(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state as nvidia-modelopt leaves it when it packs: a module with scales for every part of an expert."""
    packed = {}
    for name, tensor in state.items():
        block, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            packed[name] = tensor
            continue
        for index, expert in enumerate(tensor):
            halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
            for part, weight in halves if leaf == "gate_up_proj" else [("down_proj", expert)]:
                module = f"{block}.{index}.{part}"
                packed[f"{module}.weight"] = weight
                packed[f"{module}.weight_scale"] = weight.mean(1)
                packed[f"{module}.weight_scale_2"] = weight.mean()
                packed[f"{module}.bias"] = weight.sum(1)
    return packed


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "phimoe", "lfm2_moe", "deepseek_v3", "jamba", "minimax"])
def test_unpacked_experts_get_the_names_of_the_hub(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    expected, state = saved(model, tmp_path), unpack(stored(model))
    made = assemble(hub_tensors(model, shapes_of(state)), state)
    assert_same({name: tensor for name, tensor in made.items() if name in expected}, expected)
    scales = {name: tensor for name, tensor in made.items() if name not in expected}
    experts = [name for name in expected if ".experts." in name]
    assert len(scales) == 3 * len(experts)
    for name in experts:
        assert torch.equal(scales[name.removesuffix("weight") + "weight_scale"], expected[name].mean(1))
        assert torch.equal(scales[name.removesuffix("weight") + "weight_scale_2"], expected[name].mean())
        assert torch.equal(scales[name.removesuffix("weight") + "bias"], expected[name].sum(1))


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "granitemoe"])
def test_experts_that_the_hub_keeps_stacked_keep_their_module_names_when_unpacked(kind: str) -> None:
    model = make(kind)
    state = unpack(stored(model))
    names = {tensor.name for tensor in hub_tensors(model, shapes_of(state))}
    assert {name for name in state if ".experts." in name} <= names


def test_scales_follow_a_renamed_weight() -> None:
    shapes = shapes_of(stored(make("phimoe")))
    module = "model.layers.0.mlp.router"
    shapes |= {f"{module}.input_scale": (), "model.layers.0.self_attn.k_proj.k_scale": ()}
    names = {tensor.parts[0].source: tensor.name for tensor in hub_tensors(make("phimoe"), shapes)}
    assert names[f"{module}.weight"] == "model.layers.0.block_sparse_moe.gate.weight"
    assert names[f"{module}.input_scale"] == "model.layers.0.block_sparse_moe.gate.input_scale"
    assert names["model.layers.0.self_attn.k_proj.k_scale"] == "model.layers.0.self_attn.k_proj.k_scale"


def test_two_tensors_of_one_name_are_refused() -> None:
    model = make("mixtral")
    shapes = shapes_of(stored(model)) | {"model.layers.0.block_sparse_moe.gate.weight": (3, 32)}
    with pytest.raises(UserError, match=r"are both model\.layers\.0\.block_sparse_moe\.gate\.weight on the Hub"):
        hub_tensors(model, shapes)


def test_the_answer_does_not_depend_on_the_order_of_the_state() -> None:
    model = make("kimi_k25")
    shapes = shapes_of(stored(model))
    assert hub_tensors(model, dict(reversed(shapes.items()))) == hub_tensors(model, shapes)


def test_module_names_follow_their_weights() -> None:
    hub = "model.layers.1.block_sparse_moe"
    halves = tuple(f"{hub}.experts.{index}.{leaf}" for leaf in ("w1", "w3") for index in range(3))
    expected = {
        "lm_head": ("lm_head",),
        "model.layers.1.self_attn*": ("model.layers.1.self_attn*",),
        "model.layers.1.mlp": (hub,),
        "model.layers.1.mlp.*": (f"{hub}.*",),
        "model.layers.1.mlp.gate": (f"{hub}.gate",),
        f"{EXPERTS}*": (f"{hub}.experts*",),
        f"{EXPERTS}.gate_up_proj": halves,
        f"{EXPERTS}.down_proj": tuple(f"{hub}.experts.{index}.w2" for index in range(3)),
    }
    assert hub_module_names(make("mixtral"), expected) == expected


@pytest.mark.parametrize("whole_model", [True, False])
def test_module_names_of_unpacked_experts(whole_model: bool) -> None:
    model = make("mixtral")
    if not whole_model:
        del model.get_submodule(EXPERTS).gate_up_proj
    hub = "model.layers.1.block_sparse_moe.experts"
    expected = {f"{EXPERTS}.2.up_proj": (f"{hub}.2.w3",), f"{EXPERTS}.0.gate_proj": (f"{hub}.0.w1",)}
    assert hub_module_names(model, expected) == expected
    if whole_model:
        fused = hub_module_names(model, [*expected, f"{EXPERTS}.gate_up_proj"])[f"{EXPERTS}.gate_up_proj"]
        assert len(fused) == 6


def test_module_names_where_the_class_knows_the_prefix() -> None:
    names = hub_module_names(
        make("llava"), ["model.language_model.layers.0.mlp.up_proj", "model.vision_tower*", "lm_head"]
    )
    assert list(names.values()) == [
        ("language_model.model.layers.0.mlp.up_proj",),
        ("vision_tower*",),
        ("language_model.lm_head",),
    ]


def test_module_names_of_a_weight_that_is_a_buffer() -> None:
    model = nn.Module()
    model.gate_up_proj = nn.Module()
    model.gate_up_proj.register_buffer("weight", torch.zeros(8, 4, dtype=torch.uint8))
    model._weight_conversions = [  # type: ignore[assignment]
        WeightConverter(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight", [Concatenate(0)])
    ]
    assert hub_module_names(model, ["gate_up_proj"]) == {"gate_up_proj": ("gate_proj", "up_proj")}
