"""What one run is about: plain values that every stage function gets. Paths and digests, never tensors.

A `Run` is made once, after the source and the data are on disk, and does not change any more.
"""

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from distribute.recipe import Recipe


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk. `revision` names its content: a Hub commit, or a digest of a local folder."""

    address: str  # as the user gave it
    folder: Path
    revision: str


@dataclass(frozen=True)
class DataFile:
    """A file of calibration text, or a folder of such files. `digest` names its bytes."""

    address: str  # as the user gave it
    path: Path
    digest: str


@dataclass(frozen=True)
class Calibration:
    """How much is measured. All of it changes the statistics, so all of it is part of a stage's key."""

    samples: int = 512
    sequence_length: int = 512  # tokens
    batch_size: int = 8  # samples
    seed: int = 0
    threads: int = 1  # of a CPU rank; always the same, so that sums are added in the same order


@dataclass(frozen=True)
class Run:
    """One run of the pipeline."""

    run_id: str
    workspace: Path
    source: Source
    recipe: Recipe
    data: DataFile | None = None
    calibration: Calibration = field(default_factory=Calibration)
    max_shard_bytes: int = 5 * 10**9
    target: str | None = None
    overwrite: bool = False
    nproc: int = 1
    fail_on_unrouted_experts: bool = False
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path:
        """Where this run's report goes."""
        return self.workspace / "runs" / self.run_id


def new_run_id() -> str:
    """A name for a run: the UTC time and four random digits, for example 20260131-154500-9f3c."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
