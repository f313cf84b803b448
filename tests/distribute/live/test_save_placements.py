"""The bytes of a live export: those of transformers, for every world size and placement, and the model untouched."""

import hashlib
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from distribute import distributed_save_hf_checkpoint
from distribute.live.collect import read_state
from distribute.shards import sha256
from distribute.tensors import to_bytes
from tests.live_models import PLACEMENTS, make_live, place
from tests.torchrun import run_ranks

MODELS = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
}
WORLDS = (1, 2, 3, 4)
SHARD = "50KB"  # several files
CONTEXTS = (torch.inference_mode, torch.no_grad, nullcontext)


def fitting(world: int) -> list[str]:
    """Placements for a world; two-dimensional meshes need an even one."""
    return [name for name, (smallest, _) in PLACEMENTS.items() if world >= smallest and (smallest == 1 or world == 4)]


def state_digest(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in read_state(model.state_dict()).items():
        digest.update(f"{name} {tensor.dtype} {tensor.layout} {tensor.local.stride()}".encode())
        digest.update(to_bytes(tensor.local))
    return digest.hexdigest()


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir())}


def saves(folder: str) -> dict[str, dict[str, str]]:
    """On each rank: every model in every placement; digests of the files by "model placement"."""
    dist.init_process_group("gloo")
    found, world = {}, dist.get_world_size()
    for kind, (base, config) in MODELS.items():
        for turn, placement in enumerate(fitting(world)):
            model = make_live(base, **config)
            place(model, placement, world)
            before = state_digest(model)
            out = Path(folder, f"{kind}-{placement}")
            with CONTEXTS[turn % 3]():
                distributed_save_hf_checkpoint(model, out, 448.0, None, SHARD)
            assert state_digest(model) == before, "the model was changed"
            found[f"{kind} {placement}"] = digests(out)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The whole models, saved by one process without a process group."""
    folder = tmp_path_factory.mktemp("alone")
    for kind, (base, config) in MODELS.items():
        distributed_save_hf_checkpoint(make_live(base, **config), folder / kind, 448.0, None, SHARD)
    return {kind: folder / kind for kind in MODELS}


@pytest.mark.parametrize("world", WORLDS)
def test_world_and_placement_change_no_byte(world: int, alone: dict[str, Path], tmp_path: Path) -> None:
    results = run_ranks(saves, world, str(tmp_path), timeout=240)
    for found in results:
        assert len(found) == len(MODELS) * len(fitting(world))
        for name, files in found.items():
            assert files == digests(alone[name.split()[0]]), name
    # Nothing hidden stays beside the folders.
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name.replace(" ", "-") for name in results[0])


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("kind", MODELS)
def test_content_is_that_of_save_pretrained(kind: str, alone: dict[str, Path], tmp_path: Path) -> None:
    base, config = MODELS[kind]
    make_live(base, **config).save_pretrained(tmp_path)
    expected, found = load(tmp_path), load(alone[kind])
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape), name
        assert to_bytes(tensor) == to_bytes(found[name]), name
    for name in ("config.json", "generation_config.json"):
        assert (alone[kind] / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("kind", MODELS)
def test_index_and_digests_are_those_of_the_files(kind: str, alone: dict[str, Path]) -> None:
    folder = alone[kind]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == stored
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in load(folder).values())
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=folder, check=True)
    listed = {line.split("  ", 1)[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == {path.name for path in folder.iterdir()} - {"SHA256SUMS"}


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    distributed_save_hf_checkpoint(make_live("llama"), tmp_path, 448.0, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
