"""One checkpoint made by this project's stages in one process: `PYTHON own_stages.py JOB.json`.

The same work order and the same answer as `peer_modelopt.py`: the three stages that peers have, too, each as a rank
runs it, timed after all imports. What a run has besides (other processes, verification, publishing) is not in it.
"""

import json
import re
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from distribute.job import Job
from distribute.ranks import Ranks
from distribute.recipe import Recipe
from distribute.worker import run_stage
from tasks.export import CHECKPOINT

#: Samples that go through the model together.
BATCH = 8
MAX_SHARD_BYTES = 5_000_000_000
STAGES = ("calibrate", "quantize", "export")


def make_jobs(job: dict[str, Any], workspace: Path) -> list[Job]:
    """The jobs of the stages, each in its folder."""
    recipe = Recipe.model_validate(job["recipe"]).model_dump(mode="json")
    folders = {name: str(workspace / name) for name in STAGES}
    data = {
        "data": job["text"], "samples": len(job["samples"]), "sequence_length": len(job["samples"][0]), "seed": 0,
        "batch_size": BATCH, "threads": job["threads"], "trust_remote_code": False,
    }  # fmt: skip
    plan = {"max_shard_bytes": MAX_SHARD_BYTES, "fail_on_unrouted_experts": False}
    options = {"calibrate": data, "quantize": data | plan, "export": {}}
    inputs = {
        "calibrate": {},
        "quantize": {"calibration": folders["calibrate"]},
        "export": {"plan": folders["quantize"]},
    }
    return [Job(name, job["model"], folders[name], recipe, inputs[name], options[name]) for name in STAGES]


def main() -> None:
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    workspace = Path(job["out"] + ".stages")
    shutil.rmtree(workspace, ignore_errors=True)
    for stage in STAGES:
        import_module(f"distribute.{stage}")
    started, cpu = time.monotonic(), time.process_time()
    with Ranks.start() as ranks:
        for one in make_jobs(job, workspace):
            one.write()
            run_stage(one, ranks)
    seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu
    (workspace / "export" / CHECKPOINT).replace(job["out"])
    shutil.rmtree(workspace)
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak}) + "\n")


if __name__ == "__main__":
    main()
