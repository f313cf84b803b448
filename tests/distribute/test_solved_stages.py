"""Recipes with an algorithm through all stages, on real ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distribute.checks import check_folder
from tests.models import SENTENCES
from tests.stages import digests, jobs, result, run_stage

OPTIONS = {"samples": 8, "sequence_length": 32, "batch_size": 2}


def test_any_number_of_ranks_makes_the_same_checkpoint(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    recipe = {"preset": "int4_gptq", "dialect": "compressed-tensors", "group_size": "auto", "kv_cache": "fp8"}
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES * 3))
    found = []
    for world in (1, 2):
        stages = jobs(tiny_model("llama"), tmp_path / str(world), data=text, **recipe)
        for name in ("calibrate", "quantize", "export", "verify"):
            job = stages[name]
            run_stage(
                replace(job, options={**job.options, **OPTIONS, **stages["calibrate"].options, **OPTIONS}), world
            )
        assert result(stages["verify"])["figures"]["worst_sqnr_db"] > 8
        checkpoint = Path(stages["export"].folder) / "checkpoint"
        assert not any(check_folder(checkpoint).values())
        found.append(digests(checkpoint))
    assert found[0] == found[1]
