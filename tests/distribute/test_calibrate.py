"""The calibrate stage on real ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_statistics_are_equal_for_every_world_size(
    tiny_model: Callable[..., Path], tmp_path: Path, text: Path, kind: str
) -> None:
    found = []
    for world in (1, 2, 3):
        job = _job(tiny_model(kind), tmp_path / str(world), text)
        run_stage(job, world)
        found.append({k: v for k, v in digests(Path(job.folder)).items() if k.startswith("calibration.")})
        assert result(job)["figures"]["samples"] == 14
    assert found[0] == found[1] == found[2] and len(found[0]) == 2


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
