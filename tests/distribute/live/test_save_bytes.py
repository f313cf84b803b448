"""A live export of odd tensors, the folder it leaves, what travels, and what it costs in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from distribute import distributed_save_hf_checkpoint
from distribute.ranks import Ranks
from distribute.tensors import to_bytes
from tests.live_models import make_live, place
from tests.torchrun import run_ranks

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


class Bag(nn.Module):
    """A module that is nothing but its state."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def save(tensors: dict[str, torch.Tensor], folder: Path, size: str = "1GB") -> None:
    distributed_save_hf_checkpoint(Bag(tensors), folder, 448.0, None, size)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_holds(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = load(folder)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert to_bytes(found[name]) == to_bytes(tensor), name


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits of any dtype, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 120, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


ODD_SHAPES = [(), (0,), (1,), (3,), (0, 64), (1, 7), (2, 5), (7, 3), (2, 3, 5), (3, 1, 2, 2)]


def odd_tensors() -> dict[str, torch.Tensor]:
    made = {
        f"t{number}_{str(dtype).partition('.')[2]}": numbers(shape, dtype, number)
        for number, shape in enumerate(ODD_SHAPES)
        for dtype in DTYPES
    }
    made["transposed"] = numbers((6, 4), torch.float32).T
    made["strided"] = numbers((6, 8), torch.bfloat16)[::2, 1::3]
    made["expanded"] = numbers((1, 5), torch.float32).expand(4, 5)
    return made


def test_odd_tensors_keep_their_bits(tmp_path: Path) -> None:
    save(odd_tensors(), tmp_path / "out", "100B")
    assert_holds(tmp_path / "out", odd_tensors())


def saves_odd(folder: str) -> None:
    """Three ranks, so most tensors have fewer rows than ranks, or do not divide."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (3,))
    for name, placement in {"rows": Shard(0), "last": Shard(-1), "all": Replicate()}.items():
        placed = {
            key: distribute_tensor(tensor.contiguous(), mesh, [placement], src_data_rank=None)
            if tensor.dim()
            else tensor
            for key, tensor in odd_tensors().items()
        }
        save(placed, Path(folder, name), "100B")
    part = DeviceMesh("cpu", [0, 2])  # rank 1 holds nothing
    whole = numbers((5, 4), torch.float32)
    tensors = {
        "on_two": DTensor.from_local(
            _own(whole, part), part, [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1)
        )
    }
    save(tensors, Path(folder, "part"))
    dist.destroy_process_group()


def _own(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    place = mesh.get_coordinate()
    return whole.chunk(2)[place[0]] if place else whole[:0]


def test_uneven_empty_and_absent_shards_come_together(tmp_path: Path) -> None:
    run_ranks(saves_odd, 3, str(tmp_path))
    for name in ("rows", "last", "all"):
        assert_holds(tmp_path / name, odd_tensors())
    assert_holds(tmp_path / "part", {"on_two": numbers((5, 4), torch.float32)})


# ---- any layout

MESHES = [(4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)]


def drawn_cases() -> list[dict[str, Any]]:
    """60 cases that hypothesis draws, always the same: shape, dtype, mesh, a placement for each axis, file size."""
    cases: list[dict[str, Any]] = []

    @settings(max_examples=60, database=None, derandomize=True, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def draw(data: st.DataObject) -> None:
        shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        mesh = data.draw(st.sampled_from(MESHES))
        placements = [data.draw(st.integers(-1, len(shape) - 1)) for _ in mesh]  # -1: replicated
        cases.append({"shape": shape, "mesh": mesh, "placements": placements,
                      "dtype": data.draw(st.integers(0, len(DTYPES) - 1)),
                      "size": data.draw(st.sampled_from(["1B", "64B", "1GB"]))})  # fmt: skip

    draw()
    return cases


def saves_drawn(folder: str, cases: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    meshes = {shape: init_device_mesh("cpu", shape) for shape in MESHES}
    for number, case in enumerate(cases):
        whole = numbers(tuple(case["shape"]), DTYPES[case["dtype"]], number)
        placements = [Replicate() if dim < 0 else Shard(dim) for dim in case["placements"]]
        placed = distribute_tensor(whole, meshes[tuple(case["mesh"])], placements, src_data_rank=None)
        save({"drawn": placed, "plain": whole}, Path(folder, str(number)), case["size"])
    dist.destroy_process_group()


def test_any_layout_gives_the_whole_tensor(tmp_path: Path) -> None:
    cases = drawn_cases()
    assert len(cases) == 60
    run_ranks(saves_drawn, 4, str(tmp_path), cases, timeout=150)
    for number, case in enumerate(cases):
        whole = numbers(tuple(case["shape"]), DTYPES[case["dtype"]], number)
        assert_holds(tmp_path / str(number), {"drawn": whole, "plain": whole})


def saves_strided(folder: str) -> None:
    """Interleaved shards as they come from cutting gate and up apart: rank 0 holds rows 0, 1 of each half."""
    dist.init_process_group("gloo")
    mesh, whole = init_device_mesh("cpu", (2,)), numbers((8, 3), torch.bfloat16)
    halves = [half.chunk(2)[dist.get_rank()] for half in whole.chunk(2)]
    placed = DTensor.from_local(
        torch.cat(halves), mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=(8, 3), stride=(3, 1)
    )
    save({"gate_up": placed}, Path(folder, "out"))
    dist.destroy_process_group()


def test_interleaved_shards_come_back_in_order(tmp_path: Path) -> None:
    run_ranks(saves_strided, 2, str(tmp_path))
    assert_holds(tmp_path / "out", {"gate_up": numbers((8, 3), torch.bfloat16)})


# ---- the folder


def test_stale_shards_go_and_the_users_files_stay(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    distributed_save_hf_checkpoint(make_live("llama"), out, 448.0, None, "10KB")
    assert len(list(out.glob("model-*.safetensors"))) > 3
    (out / "tokenizer.json").write_text("{}")
    (out / "tokenizer.json").chmod(0o640)
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("mine")
    (out / "hf_quant_config.json").write_text("{}")
    distributed_save_hf_checkpoint(make_live("llama", seed=1), out, 448.0, None, "60KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(path.name for path in out.glob("*.safetensors")) == sorted(set(index["weight_map"].values()))
    assert not (out / "hf_quant_config.json").exists()
    assert ((out / "notes" / "a.txt").read_text(), (out / "tokenizer.json").read_text()) == ("mine", "{}")
    assert (out / "tokenizer.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_link_leads_to_the_folder_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    distributed_save_hf_checkpoint(make_live("llama"), tmp_path / "link", 448.0, None)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").is_file()


# ---- what travels, and memory

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 8000}


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def saves_large(folder: str, placement: str, layers: int) -> dict[str, int]:
    """Bytes that this rank sent, and by how much the save raised its peak memory."""
    dist.init_process_group("gloo")
    model = make_live("llama", num_hidden_layers=layers, **LARGE)
    place(model, placement, dist.get_world_size())
    distributed_save_hf_checkpoint(make_live("llama"), Path(folder, "first"), 448.0, None)  # imports, pools
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, sent = peak_bytes(), Ranks.join().control.bytes_sent
    distributed_save_hf_checkpoint(model, Path(folder, "out"), 448.0, None, "20MB")
    found = {"sent": Ranks.join().control.bytes_sent - sent, "grown": peak_bytes() - before}
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("placement", "world"), [("fsdp", 2), ("hsdp", 4), ("replicate", 2)])
def test_only_records_travel_of_tensors_in_whole_rows(placement: str, world: int, tmp_path: Path) -> None:
    results = run_ranks(saves_large, world, str(tmp_path), placement, 4)
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert size > 40e6
    assert 0 < sum(found["sent"] for found in results) < 0.01 * size


@pytest.mark.parametrize("placement", ["fsdp", "second"])  # the latter moves most of the model, in blocks
def test_memory_does_not_grow_with_the_model(placement: str, tmp_path: Path) -> None:
    results = run_ranks(saves_large, 2, str(tmp_path), placement, 12)
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")) > 100e6
    assert max(found["grown"] for found in results) < 40e6
