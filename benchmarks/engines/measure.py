"""Tries one checkpoint in one engine: a process of its own with a time limit. What it found is a record.

Records are lines of JSON in one file, appended as they come; the last one of a key counts. A rerun skips what has a
record already, unless the checkpoint, the engine's version or the reader changed since.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.table import READERS, Engine

#: Of one thread each, so that engines are compared alike and the machine stays usable.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
KEPT_OF_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Record:
    """What an engine did with a checkpoint. `error`: its exact message; "" where there is none."""

    case: str
    dialect: str
    engine: str
    made_of: str
    answer: str | None = None
    perplexity: float | None = None
    tokens: int = 0
    parsed: str = ""
    error: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later record replaces."""
        return (self.case, self.dialect, self.engine)


def read_records(path: Path) -> dict[tuple[str, str, str], Record]:
    """The last record of each key; a line cut short by a kill is passed over."""
    records = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            continue
        records[record.key] = record
    return records


def append_record(path: Path, record: Record) -> None:
    """Add a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def digest_of(engine: Engine, checkpoint: Path, request: dict[str, Any]) -> str:
    """Changes with the checkpoint's files, the engine's version, its reader and what is asked."""
    digest = hashlib.sha256(f"{engine.version} {json.dumps(request)}".encode())
    for path in _sources(engine):
        digest.update(path.read_bytes())
    for path in sorted(checkpoint.iterdir()):
        if path.suffix == ".safetensors" or path.name == "config.json":
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _sources(engine: Engine) -> Iterator[Path]:
    yield engine.path
    if engine.parses:
        yield READERS / "ask_scheme.py"
    if "NOGATHER_EMULATE" in engine.variables:
        yield from (READERS / "emulate.py", READERS / "arithmetic.py")


def try_engine(
    engine: Engine, checkpoint: Path, request: dict[str, Any], *, home: Path, time_limit_s: float, log_file: Path
) -> dict[str, Any]:
    """Run the reader; returns what it told, with "seconds", and "error" where it failed, hung or died."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "request.json", Path(folder) / "found.jsonl"
        asked.write_text(json.dumps(request), encoding="utf-8")
        python = home / engine.environment / "bin" / "python" if engine.environment else Path(sys.executable)
        started = time.monotonic()
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [str(python), str(engine.path), str(checkpoint), str(asked), str(out)],
                env=_variables(engine, home), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                cwd=folder, start_new_session=True,
            )  # fmt: skip
            ended = _wait(process, time_limit_s)
        found: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
        for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else []:
            found |= json.loads(line)
        if ended:
            found.setdefault("error", ended)
    return found


def _wait(process: "subprocess.Popen[bytes]", time_limit_s: float) -> str:
    """Why it is no success; "" when it is. Whatever the reader started ends with it."""
    try:
        code = process.wait(timeout=time_limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code is None:
        return f"not done in {time_limit_s:.0f} s"
    return "" if code == 0 else f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _variables(engine: Engine, home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_OF_ENVIRONMENT if name in os.environ}
    path = {"PYTHONPATH": str(home / engine.python_path)} if engine.python_path else {}
    return kept | ONE_THREAD | OFFLINE | path | engine.variables
