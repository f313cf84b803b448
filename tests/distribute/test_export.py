"""Export on real torchrun ranks: the same bytes for every world size, and after a kill."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.random_model import make_random_model
from distribute import export
from distribute.checks import check_folder
from distribute.encode import StageTensors
from distribute.errors import SourceError, StageError, WorkspaceError
from distribute.job import Job, Progress, read_json
from distribute.numerics.observers import rows_absmax
from distribute.plan import Plan, make_plan
from distribute.quantize import scale_values
from distribute.ranks import Ranks
from distribute.recipe import make_recipe
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from distribute.tensors import read_tensor, to_bytes
from tests.checkpoints import decoder_tensors, write_checkpoint, write_index
from tests.stages import command, digests, environment, jobs, result, run_stage

RECIPE = {"preset": "fp8_dynamic"}
ODD_TENSORS = {
    "model.layers.0.self_attn.alpha": torch.tensor(1.25),
    "model.layers.0.mlp.gate.e_score_correction_bias": torch.tensor([1.0001, 1.0002, 1.0003, 1.0004]),
    "model.layers.0.mlp.gate.step": torch.tensor(7),
    "model.layers.1.empty": torch.zeros(0, 64, dtype=torch.bfloat16),
    "model.layers.1.nothing": torch.zeros(0),
    "model.layers.1.flag": torch.tensor([True, False, True]),
    "model.layers.2.eh_proj.weight": torch.ones(5, 3, dtype=torch.bfloat16),  # beyond the last layer
    "mtp.layers.0.mlp.up_proj.weight": torch.full((7, 3), 0.5, dtype=torch.bfloat16),
    "visual.blocks.0.attn.qkv.weight": torch.ones(3, 5).half(),
    "model.rotary_emb.inv_freq_old": torch.arange(8.0),
}


def _write_plan(source: Path, folder: Path, max_shard_bytes: int) -> Plan:
    """A data-free plan, made without ranks."""
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, make_recipe(RECIPE), max_shard_bytes)
    weights = {m: rows_absmax(read_tensor(checkpoint, f"{m}.weight")).max() for m in plan.quantized}
    values, _ = scale_values(plan, Statistics(weights), StageTensors(folder, ()))
    folder.mkdir(parents=True)
    save_file(values, folder / "plan.safetensors")
    plan.write(folder / "plan.json")
    return plan


def _job(source: Path, root: Path, max_shard_bytes: int = 60_000) -> Job:
    job = jobs(source, root, **RECIPE)["export"]
    if not Path(job.inputs["plan"]).exists():
        _write_plan(source, Path(job.inputs["plan"]), max_shard_bytes)
    return job


def _export_alone(job: Job) -> None:
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    export.run(job, Ranks.start(), Progress(Path(job.folder), 0))


@pytest.fixture(scope="module")
def source(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts, sizes that do not divide among ranks, and tensors that no model class knows."""
    folder = Path(shutil.copytree(tiny_model("qwen3_moe", vocab=389), tmp_path_factory.mktemp("odd") / "source"))
    save_file(ODD_TENSORS, folder / "odd.safetensors")
    plain = Checkpoint.open(folder).tensors
    write_index(folder, dict.fromkeys(plain, "model.safetensors") | dict.fromkeys(ODD_TENSORS, "odd.safetensors"))
    return folder


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    job = _job(source, tmp_path_factory.mktemp("one"))
    _export_alone(job)
    return digests(Path(job.folder) / "checkpoint")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_world_size_writes_the_same_bytes(
    source: Path, expected: dict[str, str], tmp_path: Path, world: int
) -> None:
    job = _job(source, tmp_path)
    run_stage(job, world)
    assert digests(Path(job.folder) / "checkpoint") == expected
    assert len(expected) > 6
    assert result(job)["world"] == world
    assert len(result(job)["peak_memory_bytes"]) == world
    assert not (Path(job.folder) / "checkpoint.partial").exists()


def test_what_is_not_quantized_is_written_bit_for_bit(source: Path, tmp_path: Path) -> None:
    job = _job(source, tmp_path)
    _export_alone(job)
    before, after = Checkpoint.open(source), Checkpoint.open(Path(job.folder) / "checkpoint")
    coded = {output.source for output in Plan.read(Path(job.inputs["plan"]) / "plan.json").outputs if output.is_coded}
    assert len(coded) == 2 * (4 + 3 * 4)
    assert not coded & set(ODD_TENSORS)
    for name, entry in before.tensors.items():
        written = after.tensors[name]
        if name not in coded:
            assert (written.dtype, written.shape) == (entry.dtype, entry.shape)
            assert to_bytes(read_tensor(after, name)) == to_bytes(read_tensor(before, name))
    assert not any(check_folder(after.folder).values())


def test_every_file_is_recorded_with_its_digest(source: Path, expected: dict[str, str], tmp_path: Path) -> None:
    job = _job(source, tmp_path)
    _export_alone(job)
    recorded = {record["name"]: record["sha256"] for record in read_json(Path(job.folder) / "files.json")}
    assert recorded == expected


def _kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants: ranks are session leaders, so no group holds them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    tree = [pid]
    for member in tree:
        tree += [child for child, parent in parents.items() if parent == member]
    for member in tree:
        os.kill(member, signal.SIGKILL)


def test_a_killed_run_resumes_to_the_same_bytes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("llama", hidden=256, layers=8, vocab=2048)
    whole = _job(source, tmp_path / "whole", 100_000)
    _export_alone(whole)
    job = _job(source, tmp_path / "killed", 100_000)
    process = subprocess.Popen(
        command(job, 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    sealed = Path(job.folder) / "sealed"
    deadline = time.monotonic() + 120
    while not (sealed.is_dir() and len(list(sealed.glob("*.json"))) >= 3):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.001)
    _kill_tree(process.pid)
    process.wait()
    assert not (Path(job.folder) / "checkpoint").exists()
    survivors = len(list(sealed.glob("*.json")))
    run_stage(job, 3)
    assert digests(Path(job.folder) / "checkpoint") == digests(Path(whole.folder) / "checkpoint")
    assert result(job)["figures"]["files_resumed"] >= min(survivors, 3)


def test_a_sealed_file_that_was_touched_is_written_again(
    source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    job = _job(source, tmp_path)
    folder = Path(job.folder)
    plan = Plan.read(Path(job.inputs["plan"]) / "plan.json")
    _export_alone(job)
    (folder / "checkpoint").rename(folder / "checkpoint.partial")
    damaged = folder / "checkpoint.partial" / plan.files[0].name
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    (folder / "checkpoint.partial" / "left-over.tmp").write_text("x")
    _export_alone(job)
    assert digests(folder / "checkpoint") == expected


def test_weights_of_a_finished_export_are_not_written_again_and_the_rest_is(
    source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    job = _job(source, tmp_path)
    _export_alone(job)
    weights = list((Path(job.folder) / "checkpoint").glob("*.safetensors"))
    before = {path: path.stat().st_mtime_ns for path in weights}
    (Path(job.folder) / "checkpoint" / "config.json").write_text("{}")
    _export_alone(job)
    assert {path: path.stat().st_mtime_ns for path in weights} == before
    assert digests(Path(job.folder) / "checkpoint") == expected


def test_a_finished_export_that_was_altered_is_made_again(
    source: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    job = _job(source, tmp_path)
    _export_alone(job)
    damaged = next((Path(job.folder) / "checkpoint").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"\x55" * 4)
    _export_alone(job)
    assert digests(Path(job.folder) / "checkpoint") == expected


def test_files_of_a_plan_with_other_scales_are_not_resumed(source: Path, tmp_path: Path) -> None:
    job = _job(source, tmp_path)
    folder = Path(job.inputs["plan"])
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, make_recipe({"preset": "fp8"}), 1 << 30)
    ones = {module: torch.ones(()) for module in plan.quantized}
    values, _ = scale_values(plan, Statistics(ones, ones), StageTensors(folder, ()))
    plan.write(folder / "plan.json")
    save_file(values, folder / "plan.safetensors")
    _export_alone(job)
    save_file({name: value * 2 for name, value in values.items()}, folder / "plan.safetensors")
    _export_alone(job)
    written = Checkpoint.open(Path(job.folder) / "checkpoint")
    assert len(values) == 2 * len(plan.quantized)
    for name, value in values.items():
        assert torch.equal(read_tensor(written, name), value * 2)


def test_a_source_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", decoder_tensors())
    job = _job(source, tmp_path)
    write_checkpoint(source, decoder_tensors(seed=5))
    with pytest.raises(SourceError, match="has changed"):
        _export_alone(job)
    assert not (Path(job.folder) / "checkpoint").exists()


def test_a_failing_rank_ends_all_and_leaves_no_checkpoint(source: Path, tmp_path: Path) -> None:
    job = _job(source, tmp_path)
    (Path(job.inputs["plan"]) / "plan.safetensors").write_bytes(b"broken")
    done = run_stage(job, 2, check=False)
    assert done.returncode != 0
    assert read_json(Path(job.folder) / "error-0.json")["kind"] == "internal"
    assert not (Path(job.folder) / "checkpoint").exists()


def test_commit_refuses_a_file_that_is_not_sealed(source: Path, tmp_path: Path) -> None:
    job = _job(source, tmp_path)
    plan = Plan.read(Path(job.inputs["plan"]) / "plan.json")
    partial = Path(job.folder) / "checkpoint.partial"
    partial.mkdir(parents=True)
    with pytest.raises(StageError, match="not sealed"):
        export.commit(Path(job.folder), plan, Checkpoint.open(source), "digest")


def test_zero_rows_and_zero_weights_stay_zero(tmp_path: Path) -> None:
    tensors = decoder_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    for dialect in ("modelopt", "compressed-tensors"):
        root = tmp_path / dialect
        job = _job(write_checkpoint(root / "source", tensors), root)
        _export_alone(job)
        written = Checkpoint.open(Path(job.folder) / "checkpoint")
        assert not read_tensor(written, "model.layers.1.mlp.up_proj.weight").float().any()
        assert not read_tensor(written, "model.layers.0.mlp.up_proj.weight")[3].float().any()
        assert torch.all(read_tensor(written, "model.layers.1.mlp.up_proj.weight_scale") == 1.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_before_any_work_and_leaves_nothing(
    source: Path, tmp_path: Path, small_disk: Path
) -> None:
    job = replace(_job(source, tmp_path, 1 << 30), folder=str(small_disk))
    with pytest.raises(WorkspaceError, match=r"no room for model\.safetensors \(\d+ bytes\): No space left"):
        _export_alone(job)
    assert not list(small_disk.rglob("*.safetensors"))
    assert not (small_disk / "checkpoint").exists()


def test_memory_of_a_rank_is_bounded_and_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks = []
    for layers in (1, 4):  # 380 MB and 740 MB, the largest tensor is 131 MB in both
        job = _job(make_random_model(tmp_path / f"m{layers}", layers=layers), tmp_path / str(layers), 1 << 30)
        run_stage(job)
        peaks += result(job)["peak_memory_bytes"]
        shutil.rmtree(tmp_path / f"m{layers}")
    assert max(peaks) < 600e6
    assert peaks[1] - peaks[0] < 40e6
