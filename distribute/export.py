"""The export stage: every rank encodes its rows and writes them at their final offset. No weight changes ranks.

    plan       read plan.json and plan.safetensors (all ranks)
    prepare    rank 0 creates the files of a wave at full size, with headers
    encode     all ranks: source rows -> codec -> pwrite; the split is a pure function of plan and world size
    seal       fsync; each file is re-read once by one rank for its sha256 and recorded
    commit     rank 0 writes index, configs and side files, then renames checkpoint.partial to checkpoint

A wave is as many files as there are ranks, so that sealing is shared too. A rerun skips sealed files.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from distribute.encode import VALUES, StageTensors, encode_rows, offset_of, parameter_names, read_weight
from distribute.errors import StageError
from distribute.job import Job, Progress, read_json, write_json
from distribute.passthrough import copy_side_files, write_config, write_json_text
from distribute.plan import COPY, VALUE, Plan
from distribute.ranks import Ranks
from distribute.shards import (
    ShardFile,
    file_header,
    fsync_folder,
    preallocate,
    sha256,
    write_index,
    write_range,
)
from distribute.source import Checkpoint
from distribute.tensors import DTYPES, byte_range, read_exactly, to_bytes
from distribute.work import Unit, own_pieces, waves

PARTIAL = "checkpoint.partial"
FINAL = "checkpoint"
SEALED = "sealed"


def run(job: Job, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint of a plan. Called by all ranks.

    Returns:
        figures: files, bytes, and how many files an earlier attempt had finished.
    """
    folder, plan_folder = Path(job.folder), Path(job.inputs["plan"])
    partial = folder / PARTIAL
    sealed: list[str] = []
    with ranks.together("prepare"):
        plan = Plan.read(plan_folder / "plan.json")
        values = StageTensors.of_plan(plan_folder)
        checkpoint = Checkpoint.open(job.source)
        plan.check_source(checkpoint)
        digest = plan_digest(plan_folder)
        if ranks.is_first:
            sealed = list(_resume(folder, digest))
        sealed = ranks.share(sealed)
    todo = [file for file in plan.files if file.name not in sealed]
    own = sum(piece.nbytes for _, piece in own_pieces(plan, todo, ranks.rank, ranks.world))
    hashed = sum(file.size for wave in waves(todo, ranks.world) for file in wave[ranks.rank :: ranks.world])
    progress.start("export", own + hashed, "bytes")
    for wave in waves(todo, ranks.world):
        with ranks.together("prepare"):
            if ranks.is_first:
                prepare(partial, plan, wave)
        with ranks.together("encode"):
            encode_files(partial, plan, wave, ranks, checkpoint=checkpoint, values=values, progress=progress)
        with ranks.together("seal"):
            for file in wave[ranks.rank :: ranks.world]:
                _seal(folder, digest, file, progress)
    with ranks.together("commit"):
        if ranks.is_first:
            commit(folder, plan, checkpoint, digest)
    files = read_json(folder / "files.json")
    return {"files": len(files), "bytes": sum(file["size"] for file in files), "files_resumed": len(sealed)}


def plan_digest(folder: Path) -> str:
    """Names plan and values together; finished files of another plan are not reused."""
    parts = [sha256(folder / name) for name in ("plan.json", VALUES, *parameter_names(folder))]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def prepare(partial: Path, plan: Plan, files: Sequence[ShardFile]) -> None:
    """Create the given files at full size, with headers. Called by rank 0.

    Raises:
        WorkspaceError: the disk is full.
    """
    by_file = plan.by_file
    for file in files:
        preallocate(partial / file.name, file.size, file_header(by_file[file.name]))


def encode_files(
    folder: Path,
    plan: Plan,
    files: Sequence[ShardFile],
    ranks: Ranks,
    *,
    checkpoint: Checkpoint,
    values: StageTensors,
    progress: Progress,
) -> None:
    """Write this rank's share of the given files, then flush them to the disk. Called by all ranks."""
    dtype = DTYPES[plan.model_dtype]
    with ExitStack() as stack:
        fds: dict[str, int] = {}
        for unit, piece in own_pieces(plan, files, ranks.rank, ranks.world):
            name = unit.first.file
            if name not in fds:
                fds[name] = stack.enter_context(closing(_Descriptor(folder / name))).fd
            for begin, data in encode_piece(unit, piece.rows, checkpoint, values, dtype=dtype, device=ranks.device):
                write_range(fds[name], data, begin)
            progress.advance(piece.nbytes)
        for fd in fds.values():
            os.fsync(fd)  # each host must flush its own writes


def encode_piece(
    unit: Unit,
    rows: range | None,
    checkpoint: Checkpoint,
    values: StageTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[int, bytes | memoryview]]:
    """(absolute offset in the file, bytes) of the given rows of each tensor of a unit; `dtype` is the model's."""
    first = unit.first
    if first.codec == VALUE:
        yield first.begin, to_bytes(values.read(first.name))
    elif first.codec == COPY:
        assert first.source is not None, first
        entry = checkpoint.tensors[first.source]
        begin, end, _ = byte_range(entry, rows)
        buffer = bytearray(end - begin)
        with (checkpoint.folder / entry.file).open("rb") as file:
            read_exactly(file.fileno(), buffer, begin)
        yield first.begin + begin - entry.begin, memoryview(buffer)
    elif rows is not None:
        weight = read_weight(first, rows, checkpoint, values, dtype=dtype, device=device)
        stored = encode_rows(first, rows, weight, values)
        for output in unit.outputs:
            yield output.begin + offset_of(output, rows), to_bytes(stored[output.suffix])


def commit(folder: Path, plan: Plan, checkpoint: Checkpoint, digest: str) -> None:
    """Make the checkpoint visible by one rename. Called by rank 0 when every file is sealed."""
    partial = folder / PARTIAL
    records = _sealed(folder, digest)
    missing = [file.name for file in plan.files if file.name not in records]
    if missing:
        raise StageError(f"not sealed: {', '.join(missing)}")
    side = copy_side_files(checkpoint.folder, partial)
    write_config(checkpoint, partial, plan.config_changes)
    for name, text in plan.json_files.items():
        write_json_text(partial / name, text, indent=4)
    write_index(partial, plan.outputs)
    names = sorted({*side, *(path.name for path in partial.iterdir() if path.is_file())})
    files = [
        {"name": name, "size": (partial / name).stat().st_size,
         "sha256": records[name]["sha256"] if name in records else sha256(partial / name)}
        for name in names
    ]  # fmt: skip
    write_json(folder / "files.json", files)
    fsync_folder(partial)
    partial.rename(folder / FINAL)
    fsync_folder(folder)


class _Descriptor:
    """A write-only descriptor that `closing` can close."""

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_WRONLY)

    def close(self) -> None:
        os.close(self.fd)


def _seal(folder: Path, digest: str, file: ShardFile, progress: Progress) -> None:
    path = folder / PARTIAL / file.name
    content = sha256(path, on_bytes=progress.advance)
    stat = path.stat()
    record = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": content, "plan": digest}
    write_json(folder / SEALED / f"{file.name}.json", {"name": file.name, **record})


def _resume(folder: Path, digest: str) -> dict[str, dict[str, Any]]:
    """Records of sealed files; everything else that an earlier attempt left is removed. Rank 0.

    A checkpoint that was published already is taken back: whoever starts this stage again has a reason not to
    trust it. Its sealed files cost nothing, the rest is written anew.
    """
    partial, final = folder / PARTIAL, folder / FINAL
    if final.exists():
        shutil.rmtree(partial, ignore_errors=True)
        final.rename(partial)
    partial.mkdir(parents=True, exist_ok=True)
    (folder / SEALED).mkdir(exist_ok=True)
    records = _sealed(folder, digest)
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in records:
            path.unlink()
    return records


def _sealed(folder: Path, digest: str) -> dict[str, dict[str, Any]]:
    """Records of the files that an attempt at this very plan has finished and nobody has touched since."""
    records = {}
    for path in (folder / SEALED).glob("*.json"):
        record = read_json(path)
        file = folder / PARTIAL / record["name"]
        if record["plan"] == digest and file.is_file():
            stat = file.stat()
            if (stat.st_size, stat.st_mtime_ns) == (record["size"], record["mtime_ns"]):
                records[record["name"]] = record
    return records
