"""Who makes quantized checkpoints: this project and its two peers, from the same model, samples and thread count.

Each works in a process of its own; a peer with the Python that it is installed in. What a maker says is a `Made`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distribute.recipe import Recipe
from distribute.scheme import PRESETS, Scheme
from tasks.demo_model import cache_folder

OURS = "nogather"
#: Peer -> the dialect of its checkpoints.
PEERS = {"modelopt": "modelopt", "llmcompressor": "compressed-tensors"}
VERSIONS = {"modelopt": "nvidia-modelopt 0.47.0", "llmcompressor": "llm-compressor 0.14.0.1"}
#: The demo model's hidden size, 576, is a multiple of 64 and not of 128, which the presets of int4 have.
GROUP_SIZE = 64
ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 3600
#: Run as programs, each by the Python of its maker.
SCRIPTS = {OURS: "own_stages.py", "modelopt": "peer_modelopt.py", "llmcompressor": "peer_llmcompressor.py"}


@dataclass(frozen=True)
class Case:
    """One checkpoint: who makes it, and what of."""

    maker: str
    preset: str
    dialect: str

    @property
    def key(self) -> str:
        """Names files."""
        return f"{self.maker}.{self.preset}.{self.dialect}"

    @property
    def recipe(self) -> Recipe:
        """What our own maker is asked for."""
        sized = {"group_size": GROUP_SIZE} if self._is_int4 else {}
        return Recipe.model_validate({"preset": self.preset, "dialect": self.dialect, **sized})

    @property
    def scheme(self) -> Scheme:
        """How the checkpoint is coded."""
        return self.recipe.scheme_of(self.preset)

    @property
    def _is_int4(self) -> bool:
        return PRESETS[self.preset].for_dialect(self.dialect).weights.format == "int4"


@dataclass(frozen=True)
class Made:
    """`seconds`, `cpu_s`: of work, without imports; `wall_s`: of the process. `error`: why there is no checkpoint."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_bytes: int = 0
    error: str = ""


@dataclass(frozen=True)
class Work:
    """What all makers are given. `text`: the file that `samples` were taken from, as our pipeline takes them."""

    model: Path
    text: Path
    samples: Sequence[Sequence[int]]
    threads: int
    home: Path


def home_folder() -> Path:
    """$NOGATHER_QUALITY, or `quality` beside the demo's files."""
    default = cache_folder().parent / "quality"
    return Path(os.environ.get("NOGATHER_QUALITY") or default).expanduser().absolute()


def python_of(maker: str) -> Path:
    """The interpreter that a maker is installed in."""
    own = home_folder() / "llmcompressor" / "bin" / "python"
    return own if maker == "llmcompressor" else Path(sys.executable)


def make(case: Case, work: Work, folder: Path) -> Made:
    """Write a checkpoint to `folder`, which must not exist."""
    python = python_of(case.maker)
    if not python.exists():
        return Made(error=f"{VERSIONS[case.maker]} is not installed: {python} is missing")
    job = {
        "model": str(work.model), "text": str(work.text), "samples": work.samples, "preset": case.preset,
        "recipe": case.recipe.model_dump(mode="json", exclude_defaults=True), "group_size": GROUP_SIZE,
        "out": str(folder), "threads": work.threads,
    }  # fmt: skip
    path = _write(work.home / "jobs" / f"{case.key}.json", json.dumps(job))
    done, wall = _run([str(python), str(Path(__file__).with_name(SCRIPTS[case.maker])), str(path)], work.threads)
    _write(work.home / "logs" / f"{case.key}.txt", done.stdout + done.stderr)
    if done.returncode != 0:
        return Made(wall_s=wall, error=_last_line(done.stderr))
    said = json.loads(_last_line(done.stdout))
    return Made(**said, wall_s=wall)


def _run(command: list[str], threads: int) -> tuple[subprocess.CompletedProcess[str], float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, check=False,
        timeout=TIME_LIMIT_S,
    )  # fmt: skip
    return done, time.monotonic() - started


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _last_line(said: str) -> str:
    return (said.strip().splitlines() or ["it said nothing"])[-1]
