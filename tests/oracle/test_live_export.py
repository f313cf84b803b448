"""A live export against nvidia-modelopt's own exporter: the same names, dtypes, shapes, bytes and JSON.

For every recipe that can be coded here, at several world sizes and placements. Skips without the `oracle` group.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from distribute import distributed_save_hf_checkpoint
from distribute.checks import check_folder
from distribute.tensors import to_bytes
from tests.live_models import place
from tests.torchrun import run_ranks

pytest.importorskip("modelopt", reason="needs the dependency group `oracle`")

KINDS = ("llama", "qwen3_moe", "mixtral")
RECIPES = ("fp8", "fp8_kv", "fp8_pc_pt", "nvfp4", "nvfp4_kv", "nvfp4_kv4", "w4a16_nvfp4")
KV_FORMATS = {"fp8_kv": "FP8", "nvfp4_kv": "FP8", "nvfp4_kv4": "NVFP4"}
#: By world size: every (kind, recipe) takes the next of these placements.
PLACES = {1: ("plain", "fsdp"), 2: ("fsdp", "last", "tp"), 3: ("fsdp", "mixed"), 4: ("fsdp_tp", "hsdp", "fsdp")}
CASES = [(kind, recipe) for kind in KINDS for recipe in RECIPES]


def exports(folder: str) -> None:
    """On each rank: every model, quantized by the reference, saved by us."""
    from tests.oracle.modelopt_models import make_quantized  # noqa: PLC0415  imports modelopt: slow, and optional

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    for turn, (kind, recipe) in enumerate(CASES):
        model = make_quantized(kind, recipe)
        place(model, PLACES[world][turn % len(PLACES[world])], world)
        out = Path(folder, f"{kind}-{recipe}")
        distributed_save_hf_checkpoint(model, out, 448.0, KV_FORMATS.get(recipe), "100KB")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    from tests.oracle.modelopt_models import export_reference, make_quantized  # noqa: PLC0415  see `exports`

    folder = tmp_path_factory.mktemp("reference")
    return {case: export_reference(make_quantized(*case), folder / "-".join(case)) for case in CASES}


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(folder: Path, reference: Path) -> None:
    found, expected = load(folder), load(reference)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert to_bytes(found[name]) == to_bytes(tensor), name


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("world", PLACES)
def test_bytes_are_those_of_the_reference(
    world: int, references: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    run_ranks(exports, world, str(tmp_path), timeout=280)
    for case, reference in references.items():
        folder = tmp_path / "-".join(case)
        assert_same_tensors(folder, reference)
        assert read(folder, "generation_config.json") == read(reference, "generation_config.json")
        assert_same_json(folder, reference)
        assert not any(check_folder(folder).values()), check_folder(folder)


def assert_same_quantization(folder: Path, reference: Path) -> None:
    ours, theirs = (read(path, "hf_quant_config.json")["quantization"] for path in (folder, reference))
    assert ours == theirs


def assert_same_json(folder: Path, reference: Path) -> None:
    """But for the producer, and what the reference's next version writes."""
    assert_same_quantization(folder, reference)
    ours, theirs = (read(path, "config.json") for path in (folder, reference))
    blocks = [config.pop("quantization_config") for config in (ours, theirs)]
    assert ours == theirs
    for block in blocks:
        block.pop("producer")
    blocks[0].pop("group_size", None)  # 0.48 writes it, because SGLang assumes 16 without (sgl-project/sglang#31825)
    assert blocks[0] == blocks[1]


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_an_all_zero_weight_has_scale_one_where_the_reference_writes_nan(recipe: str, tmp_path: Path) -> None:
    from tests.oracle.modelopt_models import export_reference, make_quantized  # noqa: PLC0415  see `exports`

    name = "model.layers.0.self_attn.o_proj"
    for folder, export in (("ours", None), ("theirs", export_reference)):
        model = make_quantized("llama", recipe)
        projection = model.get_submodule(name)
        with torch.no_grad():
            projection.weight.zero_()
            projection.weight_quantizer._amax.zero_()
        if export:
            export(model, tmp_path / folder)
        else:
            distributed_save_hf_checkpoint(model, tmp_path / folder, 448.0, None)
    ours, theirs = (load(tmp_path / folder) for folder in ("ours", "theirs"))
    scale = f"{name}.weight_scale_2" if recipe == "nvfp4" else f"{name}.weight_scale"
    assert float(theirs[scale]) == 0.0
    assert float(ours[scale]) == 1.0
    assert not ours[f"{name}.weight"].view(torch.uint8).any()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["fp8_kv", "nvfp4"])
def test_a_model_that_is_packed_already_keeps_its_bytes(
    kind: str, recipe: str, references: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    from tests.oracle.modelopt_models import pack  # noqa: PLC0415  see `exports`

    model = pack(kind, recipe)
    distributed_save_hf_checkpoint(model, tmp_path / "out", 448.0, KV_FORMATS.get(recipe))
    assert_same_tensors(tmp_path / "out", references[kind, recipe])
    assert_same_json(tmp_path / "out", references[kind, recipe])


@pytest.mark.parametrize("recipe", ["int8_wo", "int8_sq", "int4_awq", "w4a8_awq", "mxfp8", "mxfp4", "fp8_pb_wo"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_formats_that_cannot_be_coded_here_go_through_when_packed(kind: str, recipe: str, tmp_path: Path) -> None:
    from tests.oracle.modelopt_models import export_reference, make_quantized, pack  # noqa: PLC0415  see `exports`

    if kind == "qwen3_moe" and "awq" in recipe:
        pytest.skip("the reference itself cannot smooth fused experts")
    export_reference(make_quantized(kind, recipe, hidden=128), tmp_path / "theirs")
    distributed_save_hf_checkpoint(pack(kind, recipe, hidden=128), tmp_path / "ours", 448.0, None)
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")
    if recipe not in ("mxfp4", "fp8_pb_wo"):  # 0.48 names these in capitals and with their group size, as we do
        assert_same_quantization(tmp_path / "ours", tmp_path / "theirs")
    with pytest.raises(ValueError, match="cannot be written from a float weight"):
        distributed_save_hf_checkpoint(make_quantized(kind, recipe, hidden=128), tmp_path / "float", 448.0, None)


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4_kv"])
def test_tied_embeddings_are_written_once(recipe: str, tmp_path: Path) -> None:
    from tests.oracle.modelopt_models import export_reference, make_quantized  # noqa: PLC0415  see `exports`

    export_reference(make_quantized("llama", recipe, tied=True), tmp_path / "theirs")
    model = make_quantized("llama", recipe, tied=True)
    distributed_save_hf_checkpoint(model, tmp_path / "ours", 448.0, KV_FORMATS.get(recipe))
    assert "lm_head.weight" not in load(tmp_path / "ours")
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")
    assert_same_json(tmp_path / "ours", tmp_path / "theirs")
