"""What crosses the border between the flow process and the ranks: job in, progress and result out. Torch-free.

Everything is JSON in the stage's own folder on the workspace:

    job.json            written by the flow process before the ranks start
    progress-<r>.json   {"label", "done", "total", "unit"}, rewritten by rank r at most twice a second
    error-<r>.json      written by a rank that fails
    result.json         written by rank 0 when all ranks are done

No secret is ever part of a job.
"""

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STAGES = ("sensitivity", "calibrate", "quantize", "export", "verify")


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` so that a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read one JSON file (UTF-8)."""
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Job:
    """One stage's work order. Paths are strings, because they are JSON."""

    stage: str  # one of STAGES
    source: str  # folder of the source checkpoint
    folder: str  # the stage's folder on the workspace; artifacts go here
    recipe: dict[str, Any]  # the full recipe after defaults (Recipe.model_dump(mode="json"))
    inputs: dict[str, str] = field(default_factory=dict)  # upstream artifact name -> folder
    options: dict[str, Any] = field(default_factory=dict)  # stage options: samples, max_shard_bytes, ...
    run_id: str = "run"

    def __post_init__(self) -> None:
        assert self.stage in STAGES, self.stage

    def write(self) -> Path:
        """Write `job.json` into the stage's folder and return its path."""
        path = Path(self.folder) / "job.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))
        return path

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read a job written by `write`."""
        return cls(**read_json(path))


class Progress:
    """How far one rank is, told to whoever follows the stage's folder."""

    MIN_INTERVAL_S = 0.5

    def __init__(self, folder: Path, rank: int):
        self._path = folder / f"progress-{rank}.json"
        self._last = 0.0
        self._state: dict[str, Any] = {"label": "", "done": 0, "total": 0, "unit": ""}

    def start(self, label: str, total: int, unit: str) -> None:
        """Begin a step of `total` units of this rank's own work; `unit` is "token layers", "bytes" or "tensors"."""
        self._state = {"label": label, "done": 0, "total": total, "unit": unit}
        self._write()

    def advance(self, count: int) -> None:
        """`count` more units are done."""
        self._state["done"] += count
        if time.monotonic() - self._last >= self.MIN_INTERVAL_S or self._state["done"] >= self._state["total"]:
            self._write()

    def _write(self) -> None:
        self._last = time.monotonic()
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._state), encoding="utf-8")  # no fsync: it is only a display
        temporary.replace(self._path)
