"""What a live export refuses: one error, the same on all ranks, that names tensor and rank; nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from transformers import AutoModelForCausalLM

from distribute import distributed_save_hf_checkpoint
from distribute.errors import NogatherError, UserError
from tests.distribute.live.stand_ins import FP8, Quantizer
from tests.live_models import make_live
from tests.torchrun import run_ranks


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def partial(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = two_layers()
    placed = DTensor.from_local(model[1].weight.detach(), init_device_mesh("cpu", (2,)), [Partial()])
    model[1].weight = nn.Parameter(placed, requires_grad=False)
    return model, {}


def meta(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = two_layers()
    model[1].weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    return model, {}


def missing_key(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=rank != 1)), {})


def other_dtype(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = two_layers()
    return (model.bfloat16() if rank else model), {}


def other_shape(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(nn.Linear(8, 8 + rank)), {}


def other_placement(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model, mesh = two_layers(), init_device_mesh("cpu", (2,))
    if rank:
        placed = DTensor.from_local(model[0].weight.detach()[:4], mesh, [Shard(0)], run_check=False)
        model[0].weight = nn.Parameter(placed, requires_grad=False)
    return model, {}


def unlike_meshes(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    """Rank 0 holds half of a mesh of two, rank 1 the whole of a mesh of its own."""
    model, pair, alone = two_layers(), init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1])
    weight = model[0].weight.detach()
    placed = (
        DTensor.from_local(weight, alone, [Shard(0)], run_check=False)
        if rank
        else DTensor.from_local(weight[:4], pair, [Shard(0)], run_check=False, shape=(8, 8), stride=(8, 1))
    )
    model[0].weight = nn.Parameter(placed, requires_grad=False)
    return model, {}


def other_values(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = two_layers()
    with torch.no_grad():
        model[1].bias[3] += rank
    return model, {}


def unequal_tie(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = make_live("llama", tie_word_embeddings=True)
    weight = model.lm_head.weight.detach().clone()
    weight[5, 5] += 1
    model.lm_head.weight = nn.Parameter(weight)
    return model, {}


def not_a_number(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = make_live("llama")
    layer = model.model.layers[1].self_attn.q_proj
    layer.weight_quantizer, layer.input_quantizer = Quantizer(**FP8, amax=1.0), Quantizer(**FP8, amax=1.0)
    with torch.no_grad():
        layer.weight[7, 7] = torch.nan
    return model, {}


def other_arguments(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return two_layers(), {"max_shard_size": f"{rank + 1}GB"}


def no_size(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return two_layers(), {"max_shard_size": "ten"}


def cache_of_no_format(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = make_live("llama")
    attention = model.model.layers[0].self_attn
    attention.k_bmm_quantizer = attention.v_bmm_quantizer = Quantizer(**FP8, amax=1.0)
    return model, {"kv_cache_format": "INT8"}


def quantized(**settings: Any) -> nn.Module:
    model = make_live("llama")
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight_quantizer, layer.input_quantizer = Quantizer(**FP8, amax=1.0, **settings), Quantizer(**FP8, amax=1.0)
    return model


def other_quantizer(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return quantized(is_enabled=rank == 0), {}


def other_absmax(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = quantized()
    inputs = model.model.layers[0].self_attn.o_proj.input_quantizer
    del inputs._amax
    inputs._amax = torch.tensor(1.0 + rank)  # not in the state
    return model, {}


def other_config(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = quantized()
    model.config.dtype = torch.float16 if rank else torch.bfloat16
    return model, {}


def other_tie(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = make_live("llama")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    if rank:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model, {}


def complex_numbers(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    model = two_layers()
    model.register_buffer("spectrum", torch.zeros(4, dtype=torch.complex64))
    return model, {}


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


def extra_state(rank: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(WithExtraState(4, 4)), {}


#: The model and arguments of a rank -> what the error must say.
REFUSED: dict[Callable[[int], tuple[nn.Module, dict[str, Any]]], tuple[str, ...]] = {
    partial: ("1.weight", "Partial"),
    meta: ("1.weight", "meta"),
    missing_key: ("rank 1 has no 1.bias",),
    other_dtype: ("rank 1 has 0.bias as BF16 [8]", "rank 0 as F32 [8]", "0.weight"),
    other_shape: ("rank 1", "0.weight as F32 [9, 8]", "rank 0 as F32 [8, 8]"),
    other_placement: ("rank 1", "0.weight", "whole on each rank"),
    unlike_meshes: ("0.weight", "meshes of unlike shape"),
    other_values: ("1.bias of rank 1 is not that of rank 0",),
    unequal_tie: ("lm_head.weight", "model.embed_tokens.weight", "values differ"),
    not_a_number: ("model.layers.1.self_attn.q_proj.weight", "NaN"),
    other_arguments: ("max_shard_bytes", "rank 1"),
    no_size: ("'ten' is not a size",),
    cache_of_no_format: ("kv_cache_format", "INT8", "FP8"),
    other_quantizer: ("rank 1", "model.layers.0.self_attn.o_proj.weight"),
    other_absmax: ("rank 1 model.layers.0.self_attn.o_proj.input_scale;",),
    other_config: ("rank 1 dtype of the model;",),
    other_tie: ("rank 1 lm_head.weight;",),
    complex_numbers: ("spectrum", "complex64"),
    extra_state: ("0._extra_state", "dict"),
}
NAMES = {function.__name__: says for function, says in REFUSED.items()}


def refusals(folder: str) -> dict[str, str]:
    """On each rank: the error of every case."""
    dist.init_process_group("gloo")
    found = {}
    for make in REFUSED:
        model, changes = make(dist.get_rank())
        arguments = {"maxbound": 448.0, "kv_cache_format": None, "max_shard_size": "1GB"} | changes
        try:
            distributed_save_hf_checkpoint(model, Path(folder, "out"), **arguments)
        except NogatherError as error:
            found[make.__name__] = f"{'UserError' if isinstance(error, UserError) else type(error)}: {error}"
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, str]], Path]:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "out").mkdir()
    (folder / "out" / "config.json").write_text("old")
    return run_ranks(refusals, 2, str(folder)), folder


@pytest.mark.parametrize("case", NAMES)
def test_every_rank_gets_one_error_that_says_what(case: str, refused: tuple[list[dict[str, str]], Path]) -> None:
    first, second = (found[case] for found in refused[0])
    assert first == second
    assert first.startswith("UserError"), first
    for part in NAMES[case]:
        assert any(choice in first for choice in part.split("|")), first


def test_a_refusal_writes_nothing(refused: tuple[list[dict[str, str]], Path]) -> None:
    folder = refused[1]
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert [path.name for path in (folder / "out").iterdir()] == ["config.json"]
    assert (folder / "out" / "config.json").read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": {}}, "a dict; give a torch.nn.Module"),
        ({"export_dir": 3}, "export_dir is 3"),
        ({"export_dir": ""}, "export_dir is ''"),
        ({"max_shard_size": 0}, "max_shard_size is 0"),
        ({"max_shard_size": True}, "max_shard_size is True"),
        ({"max_shard_size": "0GB"}, "not a size"),
        ({"maxbound": float("inf")}, "maxbound is inf"),
        ({"kv_cache_format": "INT8"}, "kv_cache_format is 'INT8'; a checkpoint can hold FP8, NVFP4"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    given = {"model": two_layers(), "export_dir": tmp_path / "out", "maxbound": 448.0, "kv_cache_format": None}
    with pytest.raises(ValueError, match=says):
        distributed_save_hf_checkpoint(**(given | arguments))
    assert not (tmp_path / "out").exists()


def test_a_model_without_tensors_does_not_take_the_place_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("old")
    with pytest.raises(ValueError, match="nothing to write"):
        distributed_save_hf_checkpoint(nn.Module(), tmp_path, 448.0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_tensor_of_a_name_that_the_file_format_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("__metadata__", torch.zeros(3))
    with pytest.raises(ValueError, match=r"__metadata__.*rename it"):
        distributed_save_hf_checkpoint(model, tmp_path / "out", 448.0, None)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        distributed_save_hf_checkpoint(two_layers(), tmp_path / "out", 448.0, None)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_a_wrapped_model_is_saved_under_the_names_of_the_model(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    distributed_save_hf_checkpoint(wrap(make_live("llama")), tmp_path / "wrapped", 448.0, None)
    distributed_save_hf_checkpoint(make_live("llama"), tmp_path / "plain", 448.0, None)
    for name in ("SHA256SUMS", "config.json"):
        assert (tmp_path / "wrapped" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_wrapper_that_changes_names_is_refused(tmp_path: Path) -> None:
    model = make_live("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1])
    with pytest.raises(ValueError, match=r"model\.layers\.1 is wrapped by torch\.compile"):
        distributed_save_hf_checkpoint(model, tmp_path / "out", 448.0, None)


def test_a_quantizer_whose_weight_is_not_in_the_state_is_refused(tmp_path: Path) -> None:
    model = make_live("llama")
    layer = model.model.layers[1].self_attn.q_proj
    layer.weight_quantizer, layer.input_quantizer = Quantizer(**FP8, amax=1.0), Quantizer(**FP8, amax=1.0)
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    with pytest.raises(ValueError, match="has an enabled quantizer, but the model's state has no tensor"):
        distributed_save_hf_checkpoint(model, tmp_path / "out", 448.0, None)


def test_a_model_is_saved_into_the_folder_it_was_loaded_from(tmp_path: Path) -> None:
    make_live("llama").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")  # may hold mappings of the file
    distributed_save_hf_checkpoint(loaded, tmp_path, 448.0, None, "20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for (name, one), other in zip(make_live("llama").state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
