"""What each rank runs: `python -m distribute.worker JOB.json`. File in, result file or error file out.

No Prefect, no network, no secret. A failing rank leaves `error-<r>.json`; rank 0 leaves `result.json`.
"""

import logging
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from distribute.errors import NogatherError, UserError
from distribute.job import Job, Progress, write_json
from distribute.ranks import Ranks

log = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run one stage of one job on this rank; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    job = Job.read(Path(argv[1]))
    rank = int(os.environ.get("RANK", 0))  # known even when joining the others fails
    try:
        with Ranks.start() as ranks:
            run_stage(job, ranks)
    except Exception as error:  # the border: whatever it is goes into the error file
        _write_error(Path(job.folder), rank, error)
        if isinstance(error, UserError):
            log.error("%s", error)  # a traceback would hide the sentence that helps
        else:
            log.exception("rank %d failed", rank)
        return error.exit_code if isinstance(error, NogatherError) else 1
    return 0


def run_stage(job: Job, ranks: Ranks) -> None:
    """Run the stage and let rank 0 write `result.json`. Called by all ranks."""
    folder = Path(job.folder)
    started = time.monotonic()
    # Imported late: an export rank must not pay 300 MB for transformers, which only calibration needs.
    stage = import_module(f"distribute.{job.stage}")
    figures: dict[str, Any] = stage.run(job, ranks, Progress(folder, ranks.rank))
    memory = ranks.gather({"peak_memory_bytes": peak_memory_bytes()}, None)
    if ranks.is_first:
        result = {
            "stage": job.stage,
            "world": ranks.world,
            "seconds": round(time.monotonic() - started, 3),
            "peak_memory_bytes": [part["peak_memory_bytes"] for part in memory],
            "figures": figures,
        }
        write_json(folder / "result.json", result)
    ranks.barrier()


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far, in bytes.

    Not getrusage: its maximum outlives exec, so it counts the process that started this one, too.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def _write_error(folder: Path, rank: int, error: Exception) -> None:
    record = {
        "rank": rank,
        "kind": "user" if isinstance(error, UserError) else "internal",
        "type": type(error).__name__,
        "message": str(error) or type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    write_json(folder / f"error-{rank}.json", record)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
