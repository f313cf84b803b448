"""Each damage to a finished checkpoint is found by the check that is there for it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distribute import export, quantize, verify
from distribute.checks import check_folder
from distribute.errors import SourceError, VerifyError
from distribute.job import Job, Progress, read_json
from distribute.numerics.observers import rows_absmax
from distribute.plan import make_plan
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.shards import sha256
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from distribute.tensors import read_tensor
from tests.stages import jobs, result, run_stage

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module", params=["modelopt", "compressed-tensors"])
def finished(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Root of a run with a finished export; every module has an input range of 1."""
    root = tmp_path_factory.mktemp("run")
    source = tiny_model("llama")
    stages = jobs(source, root, dialect=request.param)
    checkpoint = Checkpoint.open(source)
    names = make_plan(checkpoint, make_recipe({}), 1 << 30).quantized
    for stage in stages.values():
        Path(stage.folder).mkdir()
    weights = {m: rows_absmax(read_tensor(checkpoint, f"{m}.weight")).max() for m in names}
    report = {"warnings": []}
    Statistics(weights, {m: torch.ones(()) for m in names}, report).write(Path(stages["calibrate"].folder))
    for module, stage in ((quantize, "quantize"), (export, "export")):
        module.run(stages[stage], Ranks.start(), Progress(Path(stages[stage].folder), 0))
    return root


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _verify(root: Path, source: Path) -> dict:
    dialect = read_json(root / "quantize" / "plan.json")["recipe"]["dialect"]
    job = jobs(source, root, dialect=dialect)["verify"]
    return verify.run(job, Ranks.start(), Progress(Path(job.folder), 0))


def _faults(root: Path, source: Path) -> dict[str, list[str]]:
    with pytest.raises(VerifyError):
        _verify(root, source)
    report = read_json(root / "verify" / "verify.json")
    assert report["ok"] is False
    return {check["name"]: check["detail"] for check in report["checks"] if not check["ok"]}


def _shard_of(root: Path, tensor: str) -> Path:
    folder = root / "export" / "checkpoint"
    return folder / read_json(folder / "model.safetensors.index.json")["weight_map"][tensor]


def _edit(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path) | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, path, metadata={"format": "pt"}
    )


def test_a_sound_checkpoint_passes_and_reports_every_tensor(run: Path, tiny_model: Callable[..., Path]) -> None:
    figures = _verify(run, tiny_model("llama"))
    report = read_json(run / "verify" / "verify.json")
    assert report["ok"] and len(report["tensors"]) == 14
    assert all(25 < row["sqnr_db"] < 40 for row in report["tensors"])
    assert figures["worst_sqnr_db"] == round(min(row["sqnr_db"] for row in report["tensors"]), 2)


def test_two_ranks_find_what_one_finds(run: Path, tiny_model: Callable[..., Path]) -> None:
    source = tiny_model("llama")
    _verify(run, source)
    alone = read_json(run / "verify" / "verify.json")
    dialect = read_json(run / "quantize" / "plan.json")["recipe"]["dialect"]
    job = jobs(source, run, dialect=dialect)["verify"]
    run_stage(job, 2)
    assert result(job)["world"] == 2
    together = read_json(run / "verify" / "verify.json")
    assert together["files"] == alone["files"] and together["ok"]
    for one, other in zip(alone["tensors"], together["tensors"], strict=True):
        assert one["name"] == other["name"] and one["sqnr_db"] == pytest.approx(other["sqnr_db"])


def test_one_changed_byte_is_found(run: Path, tiny_model: Callable[..., Path]) -> None:
    path = _shard_of(run, "model.embed_tokens.weight")
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x40
    path.write_bytes(data)
    assert path.name in _faults(run, tiny_model("llama"))["sha256"][0]


def _damage_codes(codes: torch.Tensor, how: str) -> torch.Tensor:
    raw = codes.clone().view(torch.uint8)
    if how == "rows swapped":
        raw = raw.flip(0)
    elif how == "one row not written":
        raw[5] = 0
    else:
        raw[:] = 0
    return raw.view(codes.dtype)


@pytest.mark.parametrize("how", ["rows swapped", "one row not written", "nothing written"])
def test_wrong_codes_are_found_without_their_digest(run: Path, tiny_model: Callable[..., Path], how: str) -> None:
    path = _shard_of(run, f"{UP}.weight")
    _edit(path, **{f"{UP}.weight": _damage_codes(load_file(path)[f"{UP}.weight"], how)})
    record = run / "export" / "files.json"
    digest = {"sha256": sha256(path), "size": path.stat().st_size}
    files = [row | digest if row["name"] == path.name else row for row in read_json(record)]
    record.write_text(json.dumps(files))
    faults = _faults(run, tiny_model("llama"))
    assert UP in faults["content"][0] and "sha256" not in faults
    assert ("reconstruction" in faults) == (how != "one row not written")


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_scale_that_is_no_positive_number_is_found(
    run: Path, tiny_model: Callable[..., Path], value: float
) -> None:
    path = _shard_of(run, f"{UP}.input_scale")
    scale = load_file(path)[f"{UP}.input_scale"]
    _edit(path, **{f"{UP}.input_scale": torch.full_like(scale, value)})
    faults = _faults(run, tiny_model("llama"))
    assert f"{UP}.input_scale" in faults["scales"][0] and "content" in faults


def test_a_lost_tensor_and_a_foreign_file_are_found(run: Path, tiny_model: Callable[..., Path]) -> None:
    _edit(_shard_of(run, f"{UP}.input_scale"), **{f"{UP}.input_scale": None})
    (run / "export" / "checkpoint" / "notes.txt").write_text("x")
    faults = _faults(run, tiny_model("llama"))
    assert any(f"{UP}.input_scale" in fault for fault in faults["headers"])
    assert "notes.txt" in faults["folder"][0]


def _edit_json(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_folder_alone_is_checked_for_what_engines_trip_over(run: Path) -> None:
    folder = run / "export" / "checkpoint"
    assert not any(check_folder(folder).values())
    index = folder / "model.safetensors.index.json"
    _edit_json(index, lambda value: value["metadata"].update(total_size=1))
    _edit_json(folder / "config.json", lambda value: value["quantization_config"].update(ignore=["model.layers.0*"]))
    faults = check_folder(folder)
    assert "total_size is 1" in faults["index"][0]
    assert any("carries quantized tensors" in fault for fault in faults["config"]) or any(
        "lm_head is stored plain" in fault for fault in faults["config"]
    )


def test_a_missing_input_scale_is_named(run: Path) -> None:
    folder = run / "export" / "checkpoint"
    path = _shard_of(run, f"{UP}.input_scale")
    _edit(path, **{f"{UP}.input_scale": None})
    _edit_json(folder / "model.safetensors.index.json", lambda value: value["weight_map"].pop(f"{UP}.input_scale"))
    assert any(UP in fault and "input_scale" in fault for fault in check_folder(folder)["config"])


def test_a_lost_quantization_config_is_found(run: Path) -> None:
    folder = run / "export" / "checkpoint"
    _edit_json(folder / "config.json", lambda value: value.pop("quantization_config"))
    assert check_folder(folder)["config"] == ["config.json has no quantization_config"]


def test_json_files_that_disagree_are_found(run: Path) -> None:
    folder = run / "export" / "checkpoint"
    path = folder / "hf_quant_config.json"
    if not path.exists():
        path.write_text("{}")
        assert "another dialect" in check_folder(folder)["config"][0]
        return
    _edit_json(path, lambda value: value["quantization"].update(quant_algo="NVFP4"))
    assert any("quant_algo" in fault for fault in check_folder(folder)["config"])
    os.remove(path)
    assert "hf_quant_config.json is missing" in check_folder(folder)["config"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_another_shape_is_found(run: Path, shape: tuple[int, ...]) -> None:
    folder = run / "export" / "checkpoint"
    path = _shard_of(run, f"{UP}.input_scale")
    scale = load_file(path)[f"{UP}.input_scale"]
    _edit(path, **{f"{UP}.input_scale": scale.reshape(shape)})
    faults = check_folder(folder)["shapes"]
    assert bool(faults) == (tuple(scale.shape) != shape)
    assert all(f"{UP}.input_scale has shape {list(shape)}" in fault for fault in faults)


def _verify_alone(folder: Path, root: Path) -> dict:
    (root / "alone").mkdir(exist_ok=True)
    job = Job("verify", str(folder), str(root / "alone"), make_recipe({}).model_dump(mode="json"))
    return verify.run(job, Ranks.start(), Progress(Path(job.folder), 0))


def test_a_folder_that_is_not_what_its_receipt_says_is_not_sound(run: Path) -> None:
    folder = run / "export" / "checkpoint"
    files = read_json(run / "export" / "files.json")
    (folder / "receipt.json").write_text(json.dumps({"files": files}))
    _verify_alone(folder, run)
    path = _shard_of(run, f"{UP}.weight")
    path.write_bytes(path.read_bytes()[:-1] + b"\x11")
    with pytest.raises(VerifyError, match=r"is not sound: receipt: .* is not what was published"):
        _verify_alone(folder, run)


def test_a_plain_model_is_not_verified_and_nobody_is_told_to_remove_it(
    run: Path, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(SourceError, match="no quantized checkpoint") as caught:
        _verify_alone(tiny_model("llama"), run)
    assert "remove" not in str(caught.value)
