"""Run the real stages on real ranks, without Prefect: `torchrun -m distribute.worker JOB.json`."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from distribute.job import Job, read_json
from distribute.recipe import make_recipe

CALIBRATION = {
    "samples": 6, "sequence_length": 24, "batch_size": 2, "seed": 0, "threads": 1, "trust_remote_code": False,
}  # fmt: skip


def command(job: Job, world: int) -> list[str]:
    """The torchrun command line of a job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [*torchrun, "-m", "distribute.worker", str(job.write())]


def run_stage(job: Job, world: int = 1, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run one stage on `world` ranks; one rank needs no torchrun."""
    argv = command(job, world) if world > 1 else [sys.executable, "-m", "distribute.worker", str(job.write())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment())
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def environment() -> dict[str, str]:
    """One compute thread a rank, so that small tests do not fight for cores."""
    return os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def jobs(
    source: Path, root: Path, *, data: Path | None = None, max_shard_bytes: int = 60_000, **recipe: Any
) -> dict[str, Job]:
    """The jobs of a whole run below `root`, by stage."""
    full = make_recipe(recipe).model_dump(mode="json")
    folders = {stage: root / stage for stage in ("calibrate", "quantize", "export", "verify")}
    options = {
        "calibrate": CALIBRATION | {"data": str(data) if data else None},
        "quantize": {"max_shard_bytes": max_shard_bytes, "fail_on_unrouted_experts": False},
    }
    inputs = {
        "quantize": {"calibration": str(folders["calibrate"])},
        "export": {"plan": str(folders["quantize"])},
        "verify": {"plan": str(folders["quantize"]), "checkpoint": str(folders["export"])},
    }
    return {
        stage: Job(stage, str(source), str(folder), full, inputs.get(stage, {}), options.get(stage, {}))
        for stage, folder in folders.items()
    }


def result(job: Job) -> dict[str, Any]:
    """What rank 0 reported."""
    return read_json(Path(job.folder) / "result.json")


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder, by relative name."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
