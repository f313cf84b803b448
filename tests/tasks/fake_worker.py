"""A worker that obeys the job contract with the standard library alone: `python -m tests.tasks.fake_worker JOB.json`.

FAKE_WORKER says what happens: "ok", "die" (killed halfway), "user" and "internal" (an error), "noisy", "hang".
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ARTIFACTS = {
    "calibrate": ["calibration.safetensors", "calibration.json"],
    "quantize": ["plan.json", "plan.safetensors"],
    "export": ["checkpoint/model.safetensors", "checkpoint/config.json"],
    "verify": ["verify.json"],
}


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, rank = Path(job["folder"]), int(os.environ.get("RANK", 0))
    mode = os.environ.get("FAKE_WORKER", "ok")
    progress = {"label": job["stage"], "done": 1, "total": 2, "unit": "tokens"}
    (folder / f"progress-{rank}.json").write_text(json.dumps(progress))
    sys.stdout.write(f"rank {rank} works\n")
    sys.stdout.flush()
    if mode in ("user", "internal"):
        return fail(folder, rank, mode)
    if mode == "noisy":
        sys.stdout.buffer.write(b"x" * 100_000 + b"\n" + b"\xff\xfe not utf-8\n" + b"flood\n" * 20_000)
        sys.stdout.flush()
    if mode == "hang":
        time.sleep(600)
    if rank == 0:
        begun = folder / "begun"  # what an interrupted attempt leaves for the next one
        resumed = begun.exists()
        begun.write_text("")
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        for name in ARTIFACTS[job["stage"]]:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{name} of {job['options']}")
        figures = {"resumed": resumed, "job": job}
        result = {"stage": job["stage"], "seconds": 1.5, "peak_memory_bytes": [100, 200], "figures": figures}
        (folder / "result.json").write_text(json.dumps(result))
    return 0


def fail(folder: Path, rank: int, kind: str) -> int:
    error = {
        "rank": rank,
        "kind": kind,
        "type": "DataError" if kind == "user" else "ZeroDivisionError",
        "message": "the text is empty" if kind == "user" else "division by zero",
        "traceback": "Traceback (most recent call last):\n  ...\nZeroDivisionError: division by zero\n",
        "time": 0.0,
    }
    (folder / f"error-{rank}.json").write_text(json.dumps(error))
    return 2 if kind == "user" else 1


if __name__ == "__main__":
    sys.exit(main())
