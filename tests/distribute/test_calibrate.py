"""The calibrate stage on real ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distribute.calibrate import dead_experts
from distribute.job import Job, read_json
from distribute.statistics import Statistics
from tests.checkpoints import decoder_tensors, write_checkpoint
from tests.models import SENTENCES
from tests.stages import digests, jobs, result, run_stage


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Rows of different lengths: batches are of unequal size, and no two ranks do the same work."""
    path = tmp_path / "text.jsonl"
    rows = [{"text": sentence[: 20 + 9 * i]} for i, sentence in enumerate(SENTENCES * 3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _job(source: Path, root: Path, text: Path | None, **options: object) -> Job:
    job = jobs(source, root, data=text, preset="fp8" if text else "fp8_dynamic")["calibrate"]
    return replace(job, options=job.options | {"samples": 14, "sequence_length": 32, "batch_size": 3} | options)


def _statistics(job: Job) -> Statistics:
    return Statistics.read(Path(job.folder))


@pytest.mark.parametrize(("kind", "worlds"), [("llama", (1, 2, 3)), ("mixtral", (1, 3))])
def test_statistics_are_equal_for_every_world_size(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    text: Path,
    kind: str,
    worlds: tuple[int, ...],
) -> None:
    found = []
    for world in worlds:
        job = _job(tiny_model(kind), tmp_path / str(world), text)
        run_stage(job, world)
        found.append({k: v for k, v in digests(Path(job.folder)).items() if k.startswith("calibration.")})
        assert result(job)["figures"]["samples"] == 14
    assert all(one == found[0] for one in found) and len(found[0]) == 2


def test_every_quantized_layer_has_ranges(tiny_model: Callable[..., Path], tmp_path: Path, text: Path) -> None:
    job = _job(tiny_model("llama"), tmp_path, text)
    run_stage(job)
    statistics = _statistics(job)
    assert len(statistics.input_absmax) == len(statistics.weight_absmax) == 14
    assert all(value.dim() == 0 and value > 0 for value in statistics.input_absmax.values())
    assert statistics.report["tokens"] > 0 and len(statistics.report["data_digest"]) == 64


def test_a_data_free_recipe_measures_weights_only(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    job = _job(tiny_model("llama"), tmp_path, None)
    run_stage(job, 2)
    statistics = _statistics(job)
    assert len(statistics.weight_absmax) == 14 and not statistics.input_absmax
    assert statistics.report["samples"] == 0


def test_a_damaged_weight_stops_before_any_forward(
    tiny_model: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    tensors = decoder_tensors()
    tensors["model.norm.weight"][3] = float("nan")
    job = _job(write_checkpoint(tmp_path / "source", tensors), tmp_path, None)
    done = run_stage(job, 2, check=False)
    error = read_json(Path(job.folder) / "error-0.json")
    assert done.returncode != 0 and error["kind"] == "user"
    assert "model.norm.weight holds 1 NaN and 0 Inf, first at index [3]" in error["message"]
    assert not (Path(job.folder) / "calibration.safetensors").exists()


def test_what_only_looks_like_a_linear_layer_is_refused(tmp_path: Path) -> None:
    tensors = decoder_tensors() | {"model.layers.0.mlp.lookup.weight": torch.ones(4, 8).bfloat16()}
    sizes = {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    job = _job(write_checkpoint(tmp_path / "source", tensors, **sizes), tmp_path, None)
    run_stage(job, check=False)
    assert "model.layers.0.mlp.lookup" in read_json(Path(job.folder) / "error-0.json")["message"]


def test_experts_without_tokens_are_listed_once() -> None:
    assert dead_experts({"a": [1, 2], "b": [3]}) == []
    (warning,) = dead_experts({"a": [0, 5, 0], "b": [1, 0]})
    assert "a: 0, 2; b: 1" in warning


def test_experts_that_no_token_reached_still_get_a_scale(
    tiny_model: Callable[..., Path], tmp_path: Path, text: Path
) -> None:
    stages = jobs(tiny_model("qwen3_moe", experts=8), tmp_path, data=text, preset="fp8", dialect="compressed-tensors")
    two_tokens = {"samples": 1, "sequence_length": 2}  # two experts a token: at least four of eight stay unreached
    calibrate = replace(stages["calibrate"], options=stages["calibrate"].options | two_tokens)
    run_stage(calibrate)
    counts = read_json(Path(calibrate.folder) / "calibration.json")["tokens_per_expert"]
    dead = [(block, i) for block, tokens in counts.items() for i, n in enumerate(tokens) if n == 0]
    assert len(counts) == 2 and len(dead) >= 8
    run_stage(stages["quantize"])
    values = load_file(Path(stages["quantize"].folder) / "plan.safetensors")
    for block, i in dead:
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            assert values[f"{block}.{i}.{leaf}.input_scale"].float().item() > 0
    assert any("no calibration token" in warning for warning in result(stages["quantize"])["figures"]["warnings"])
    strict = replace(stages["quantize"], options=stages["quantize"].options | {"fail_on_unrouted_experts": True})
    assert run_stage(strict, check=False).returncode == 2
    assert "saw no calibration token" in read_json(Path(strict.folder) / "error-0.json")["message"]
