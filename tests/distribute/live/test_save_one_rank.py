"""One rank of three is unlike the others: all get the same error, soon, and the ranks can go on together."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from distribute import distributed_save_hf_checkpoint
from distribute.errors import UserError
from tests.distribute.live.saved import digests
from tests.distribute.live.stand_ins import FP8, Quantizer
from tests.live_models import make_live, place
from tests.torchrun import left_segments, run_ranks

WORLD, ODD = 3, 2  # the last rank is the odd one, since rank 0 is what others are compared with
SOON_S = 20.0  # for a busy machine; the limit of a wait is six hours
Case = Callable[[bool, Path], tuple[Any, dict[str, Any]]]


def placed(tensor: torch.Tensor, placement: Any) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = distribute_tensor(tensor.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=False)


def layers(placement: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8))
    if placement is not None:
        model[1].weight = placed(model[1].weight, placement)
    return model


def shard_of(weight: nn.Parameter) -> torch.Tensor:
    """This rank's part, to be written to."""
    assert isinstance(weight, DTensor)
    return weight.detach().to_local()


def on_meta(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers().to("meta") if odd else layers(), {}


def partial_sum(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    model, mesh = layers(Replicate()), init_device_mesh("cpu", (WORLD,))
    if odd:
        model[1].weight = nn.Parameter(
            DTensor.from_local(shard_of(model[1].weight), mesh, [Partial()]), requires_grad=False
        )
    return model, {}


def complex_numbers(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    model = layers()
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex64 if odd else torch.float32))
    return model, {}


class Stateful(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}


def no_tensor(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    model = layers()
    if odd:
        model[0].__class__ = Stateful
    return model, {}


def further_key(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    model = layers()
    if odd:
        model.register_buffer("steps", torch.zeros(1))
    return model, {}


def lacking_layer(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers()[:1] if odd else layers(), {}


def other_name(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return nn.ModuleDict({"b" if odd else "a": layers()}), {}


def other_replica(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    model = layers(Replicate())
    if odd:
        shard_of(model[1].weight)[7, 8] += 1
    return model, {}


def negative_zero(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Equal to torch, but not the same bytes."""
    model = layers(Replicate())
    shard_of(model[1].weight)[0, 0] = -0.0 if odd else 0.0
    return model, {}


def short_shard(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    model, mesh = layers(), init_device_mesh("cpu", (WORLD,))
    rows = torch.ones(2 if odd else 3, 9)
    shard = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=(9, 9), stride=(9, 1))
    model[1].weight = nn.Parameter(shard, requires_grad=False)
    return model, {}


def unequal_tie(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    """In rows that one rank alone holds."""
    model = make_live("llama", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    place(model, "fsdp", WORLD)
    if odd:
        shard_of(model.lm_head.weight)[0, 0] += 1
    return model, {}


def not_a_number(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    """In a row of a weight to be coded that one rank alone holds."""
    model = make_live("llama")
    layer = model.model.layers[1].self_attn.q_proj
    layer.weight_quantizer, layer.input_quantizer = Quantizer(**FP8, amax=1.0), Quantizer(**FP8, amax=1.0)
    place(model, "fsdp", WORLD)
    if odd:
        shard_of(layer.weight)[0, 0] = torch.nan
    return model, {}


def other_folder(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers(), {"export_dir": folder / ("elsewhere" if odd else "out")}


def other_maxbound(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers(), {"maxbound": 127.0 if odd else 448.0}


def other_cache(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers(), {"kv_cache_format": "FP8" if odd else None}


def other_qlora(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers(), {"is_modelopt_qlora": odd}


def no_model(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return None if odd else layers(), {}


def bad_size(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers(), {"max_shard_size": -1 if odd else "1GB"}


def a_file(odd: bool, folder: Path) -> tuple[Any, dict[str, Any]]:
    return layers(), {"export_dir": folder / "out" / "config.json"}


#: Model and arguments of a rank -> what the error must say.
CASES: dict[Case, tuple[str, ...]] = {
    on_meta: ("rank 2", "0.bias", "meta"),
    partial_sum: ("rank 2", "1.weight", "Partial"),
    complex_numbers: ("rank 2", "phases", "complex64"),
    no_tensor: ("rank 2", "0._extra_state"),
    further_key: ("rank 2 has steps, which rank 0 lacks",),
    lacking_layer: ("rank 2 has no 1.bias", "has no 1.weight"),
    other_name: ("rank 2 has no a.0.bias", "and 3 more"),
    other_replica: ("1.weight of rank 2 is not that of rank 0",),
    negative_zero: ("1.weight of rank 2 is not that of rank 0",),
    short_shard: ("rank 2", "1.weight", "[2, 9] of [9, 9]", "[3, 9]"),
    unequal_tie: ("rank 2: lm_head.weight and model.embed_tokens.weight are tied, but their values differ",),
    not_a_number: ("model.layers.1.self_attn.q_proj.weight", "NaN"),
    other_folder: ("folder", "elsewhere on rank 2"),
    other_maxbound: ("maxbound is 448.0 on rank 0 and 127.0 on rank 2",),
    other_cache: ("kv_cache_format is None on rank 0 and FP8 on rank 2",),
    other_qlora: ("is_modelopt_qlora is False on rank 0 and True on rank 2",),
    no_model: ("rank 2: the model is a NoneType",),
    bad_size: ("rank 2: max_shard_size is -1",),
    a_file: ("config.json is a file; name a folder",),
}
NAMES = {case.__name__: says for case, says in CASES.items()}


def refusals(root: str) -> dict[str, Any]:
    """On each rank: [error, seconds] by case, and the process; then the ranks export a model that is well."""
    dist.init_process_group("gloo")
    folder, found = Path(root), {"pid": os.getpid()}
    for case in CASES:
        model, changes = case(dist.get_rank() == ODD, folder)
        arguments = {"export_dir": folder / "out", "maxbound": 448.0, "kv_cache_format": None} | changes
        begin = time.monotonic()
        try:
            distributed_save_hf_checkpoint(model, **arguments)
        except UserError as error:
            found[case.__name__] = [f"{type(error).__name__}: {error}", time.monotonic() - begin]
    distributed_save_hf_checkpoint(layers(Shard(0)), folder / "well", 448.0, None)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("one_rank")
    distributed_save_hf_checkpoint(make_live("llama"), folder / "out", 448.0, None, "30KB")
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    return run_ranks(refusals, WORLD, str(folder)), folder, before


@pytest.mark.parametrize("case", NAMES)
def test_one_error_reaches_every_rank_soon(case: str, refused: tuple[list[dict[str, Any]], Path, Any]) -> None:
    texts, seconds = zip(*(found[case] for found in refused[0]), strict=True)
    assert len(set(texts)) == 1, texts
    for part in NAMES[case]:
        assert part in texts[0]
    assert max(seconds) < SOON_S


def test_the_old_checkpoint_stays_and_nothing_is_beside_it(refused: tuple[Any, Path, dict[str, bytes]]) -> None:
    results, folder, before = refused
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before
    assert sorted(path.name for path in folder.iterdir()) == ["out", "well"]
    pids = {str(found["pid"]) for found in results}  # other jobs of this machine have segments, too
    assert [name for name in left_segments() if pids & set(name.split("-"))] == []


def test_the_ranks_export_together_afterwards(refused: tuple[Any, Path, Any], tmp_path: Path) -> None:
    distributed_save_hf_checkpoint(layers(), tmp_path / "alone", 448.0, None)
    assert digests(refused[1] / "well") == digests(tmp_path / "alone")
