"""The verify stage: re-reads what export wrote and compares it with plan and source. Called by all ranks.

Files and tensors are shared among ranks. Everything is checked before the verdict, so one report names every
fault. With no plan and no source (`nogather verify DIR`) only the checks of `distribute.checks` are made.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distribute.checks import check_folder
from distribute.encode import StageTensors, encode_rows, read_weight, rows_of
from distribute.errors import NogatherError, SourceError, VerifyError
from distribute.export import FINAL
from distribute.job import Job, Progress, read_json, write_json
from distribute.numerics.table import find_codec
from distribute.passthrough import checkpoint_files
from distribute.plan import COPY, VALUE, Output, Plan
from distribute.ranks import Ranks
from distribute.shards import sha256
from distribute.source import ITEMSIZE, Checkpoint, TensorEntry, read_entries
from distribute.tensors import DTYPES, read_entry, to_bytes
from distribute.work import Piece, Unit, own_pieces

Faults = list[str]
RECEIPT = "receipt.json"
#: Bytes compared at once: their fp32 copies stay in a core's cache.
COMPARED_BYTES = 1 << 19
#: By bits of a code: 8 bits keep about 31 dB whatever the weights are, 4 bits about 18, and less with few outliers of
#: great size. Less than this means a wrong scale or wrong rows.
MIN_SQNR_DB = {8: 15.0, 4: 5.0}


@dataclass(frozen=True)
class _Subject:
    """What is verified: the written checkpoint, and what it should be."""

    folder: Path
    files: list[dict[str, Any]]  # name, size, sha256 as export recorded them
    plan: Plan
    values: StageTensors
    source: Checkpoint


def run(job: Job, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Verify a checkpoint. Called by all ranks; rank 0 writes verify.json.

    Raises:
        VerifyError: a check failed; the text names the first faults, verify.json all of them.
    """
    if "plan" not in job.inputs:
        return _verify_folder(job, ranks)
    plan_folder, export_folder = Path(job.inputs["plan"]), Path(job.inputs["checkpoint"])
    own: dict[str, Any] = {}
    with ranks.together("verify"):
        subject = _Subject(
            folder=export_folder / FINAL,
            files=read_json(export_folder / "files.json"),
            plan=Plan.read(plan_folder / "plan.json"),
            values=StageTensors.of_plan(plan_folder),
            source=Checkpoint.open(job.source),
        )
        headers = ranks.share(header_faults(subject.folder, subject.plan) if ranks.is_first else None)
        files = subject.files[ranks.rank :: ranks.world]
        progress.start("hash", sum(file["size"] for file in files), "bytes")
        own = {"sha256": _hash_faults(subject.folder, files, progress)}
        own |= _compare(subject, ranks, progress, skip=headers.keys())
    parts = ranks.gather(own, None)
    checks: dict[str, Faults] = {}
    with ranks.together("verify"):
        if ranks.is_first:
            checks, tensors = _judge(subject, headers, parts)
            _write_report(Path(job.folder), checks, subject.files, tensors)
            _refuse(checks, f"the written checkpoint is not sound (remove {export_folder} to have it written anew)")
            return _figures(subject.files, tensors)
    return {}


def sqnr_db(signal: float, noise: float) -> float | None:
    """10 log10(sum w² / sum (w - ŵ)²) in dB; None when nothing was lost or nothing was there."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def _verify_folder(job: Job, ranks: Ranks) -> dict[str, Any]:
    with ranks.together("verify"):
        if ranks.is_first:
            folder = Path(job.source)
            refuse_plain(folder)
            checks = check_folder(folder)
            files = [
                {"name": name, "size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
                for name in checkpoint_files(folder)
            ]
            checks["receipt"] = receipt_faults(folder, files)
            _write_report(Path(job.folder), checks, files, [])
            _refuse(checks, f"{folder} is not sound")
            return _figures(files, [])
    return {}


def refuse_plain(folder: Path) -> None:
    """Raise SourceError when the folder holds a checkpoint that nobody has quantized."""
    if not Checkpoint.open(folder).config.get("quantization_config"):
        raise SourceError(
            f"{folder} is no quantized checkpoint: its config.json has no quantization_config; "
            "give the folder that a run has written"
        )


def receipt_faults(folder: Path, files: list[dict[str, Any]]) -> Faults:
    """Files that differ from what the receipt of their publication says; none without a receipt."""
    if not (folder / RECEIPT).is_file():
        return []
    published = {entry["name"]: entry["sha256"] for entry in read_json(folder / RECEIPT)["files"]}
    found = {record["name"]: record["sha256"] for record in files}
    wrong = sorted(name for name, digest in published.items() if found.get(name) != digest)
    return [f"{name} is not what was published: its sha256 differs from {RECEIPT}" for name in wrong]


def _hash_faults(folder: Path, files: list[dict[str, Any]], progress: Progress) -> Faults:
    faults = []
    for record in files:
        path = folder / record["name"]
        if not path.is_file():
            faults.append(f"{record['name']} is missing")
        elif path.stat().st_size != record["size"] or sha256(path, on_bytes=progress.advance) != record["sha256"]:
            faults.append(f"{record['name']} is not what export wrote: size or sha256 differs")
    return faults


def _compare(subject: _Subject, ranks: Ranks, progress: Progress, *, skip: Collection[str]) -> dict[str, Any]:
    """This rank's share of the comparison with the source: sums of squares by tensor, and pieces that differ.

    Files in `skip` have damaged headers: their bytes mean nothing.
    """
    files = [file for file in subject.plan.files if file.name not in skip]
    total = sum(piece.nbytes for _, piece in own_pieces(subject.plan, files, ranks.rank, ranks.world))
    progress.start("verify", total, "bytes")
    power: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    differ: Faults = []
    for unit, piece in own_pieces(subject.plan, files, ranks.rank, ranks.world):
        first = unit.first
        if not first.is_coded:
            written = read_entry(subject.folder, first, piece.rows)
            if to_bytes(written) != to_bytes(_expected(subject, first, piece)):
                differ.append(f"{first.name} differs from its {'source' if first.codec == COPY else 'plan'}")
        elif piece.rows is not None:
            wrong, signal, noise = _decode(subject, unit, piece.rows, ranks.device)
            differ += [f"{name} differs from its source coded again, in rows {_span(piece)}" for name in wrong]
            power[first.module][0] += signal
            power[first.module][1] += noise
        progress.advance(piece.nbytes)
    return {"content": differ, "power": dict(power)}


def _entry(output: Output) -> TensorEntry:
    return TensorEntry(output.name, output.dtype, output.shape, output.file, output.begin, output.end)


def _expected(subject: _Subject, output: Output, piece: Piece) -> torch.Tensor:
    if output.codec == VALUE:
        return subject.values.read(output.name)
    assert output.source is not None
    return read_entry(subject.source.folder, subject.source.tensors[output.source], piece.rows)


def _decode(subject: _Subject, unit: Unit, rows: range, device: torch.device) -> tuple[list[str], float, float]:
    """Tensors whose rows are not what the source gives when it is coded again; sum w² and sum (w - ŵ)².

    Sums are in fp64 over fp32 values. w is the weight after smoothing: what the codes stand for. A unit that holds
    only a part of its module's tensors has the rest made again.
    """
    first, codec = unit.first, find_codec(unit.first.codec)
    wrong: set[str] = set()
    signal, noise = 0.0, 0.0
    for block in _blocks(first, rows):
        weight = read_weight(
            first, block, subject.source, subject.values, dtype=DTYPES[subject.plan.model_dtype], device=device
        )
        again = encode_rows(first, block, weight, subject.values)
        for output in unit.outputs:
            written = read_entry(subject.folder, output, rows_of(output, block)).to(device)
            if not torch.equal(written.view(torch.uint8), again[output.suffix].view(torch.uint8)):
                wrong.add(output.name)
            again[output.suffix] = written
        exact = weight.to(torch.float32)
        error = codec.decode({**subject.values.of(first.module), **again}, exact.shape[1]).sub_(exact)
        signal += exact.square_().sum(dtype=torch.float64).item()
        noise += error.square_().sum(dtype=torch.float64).item()
    return sorted(wrong), signal, noise


def _blocks(output: Output, rows: range) -> Iterator[range]:
    """Rows cut so that fp32 copies stay in a core's cache."""
    step = max(1, COMPARED_BYTES // max(1, output.columns) // output.together) * output.together
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


def _span(piece: Piece) -> str:
    return f"{piece.rows.start} to {piece.rows.stop - 1}" if piece.rows else "all"


def _judge(
    subject: _Subject, headers: Mapping[str, Faults], parts: list[dict[str, Any]]
) -> tuple[dict[str, Faults], list[dict[str, Any]]]:
    """All checks and the row of every quantized tensor. Rank 0."""
    checks: dict[str, Faults] = {
        "headers": [f"{file}: {fault}" for file, faults in headers.items() for fault in faults],
        "sha256": [fault for part in parts for fault in part["sha256"]],
        "folder": _folder_faults(subject),
        "content": [fault for part in parts for fault in part["content"]],
    }
    try:
        checks |= check_folder(subject.folder)
    except NogatherError as error:
        checks["readable"] = [str(error)]
    power: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for part in parts:
        for name, (signal, noise) in part["power"].items():
            power[name][0] += signal
            power[name][1] += noise
    tensors = _tensor_rows(subject, power)
    bits = {module: scheme.weights.bits for module, scheme in subject.plan.schemes.items()}
    checks["reconstruction"] = [
        f"{name} is not what its source was: SQNR {sqnr_db(signal, noise)} dB, "
        f"at least {MIN_SQNR_DB[bits[name]]} is expected"
        for name, (signal, noise) in power.items()
        if not noise <= signal * 10 ** (-MIN_SQNR_DB[bits[name]] / 10)  # not <=: a NaN is a fault
    ]
    return checks, tensors


def _tensor_rows(subject: _Subject, power: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """One row a quantized module: what was lost, and how large it was and is."""
    dtypes = subject.source.tensors
    by_module: dict[str, list[Output]] = defaultdict(list)
    for output in subject.plan.outputs:
        if output.is_coded:
            by_module[output.module].append(output)
    rows = []
    for module, outputs in by_module.items():
        first = outputs[0]
        itemsize = ITEMSIZE[dtypes[first.source or ""].dtype]
        rows.append(
            {
                "name": f"{module}.weight",
                "codec": first.codec,
                "sqnr_db": sqnr_db(*power[module]),
                "source_bytes": first.rows * first.columns * itemsize,
                "bytes": sum(output.nbytes for output in outputs),
            }
        )
    return rows


def header_faults(folder: Path, plan: Plan) -> dict[str, Faults]:
    """Faults by file: each header must say what the plan says: names, dtypes, shapes and byte ranges."""
    faults: dict[str, Faults] = {}
    by_file = plan.by_file
    for file in plan.files:
        planned = {output.name: _entry(output) for output in by_file[file.name]}
        try:
            found = {entry.name: entry for entry in read_entries(folder, file.name)}
        except (NogatherError, OSError) as error:
            faults[file.name] = [str(error)]
            continue
        wrong = sorted(name for name in planned.keys() | found.keys() if planned.get(name) != found.get(name))
        if wrong:
            faults[file.name] = [f"{name} is not stored as planned" for name in wrong]
    return faults


def _folder_faults(subject: _Subject) -> Faults:
    present = {path.relative_to(subject.folder).as_posix() for path in subject.folder.rglob("*") if path.is_file()}
    return [
        f"{name} does not belong to the checkpoint" for name in sorted(present - {f["name"] for f in subject.files})
    ]


def _write_report(
    folder: Path, checks: dict[str, Faults], files: list[dict[str, Any]], tensors: list[dict[str, Any]]
) -> None:
    report = {
        "ok": not any(checks.values()),
        "checks": [{"name": name, "ok": not faults, "detail": faults} for name, faults in checks.items()],
        "files": files,
        "tensors": tensors,
    }
    write_json(folder / "verify.json", report)


def _refuse(checks: dict[str, Faults], what: str) -> None:
    faults = [f"{name}: {fault}" for name, found in checks.items() for fault in found]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise VerifyError(f"{what}: {'; '.join(faults[:3])}{more}")


def _figures(files: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> dict[str, Any]:
    levels = sorted(row["sqnr_db"] for row in tensors if row["sqnr_db"] is not None)
    return {
        "files": len(files),
        "bytes": sum(record["size"] for record in files),
        "worst_sqnr_db": round(levels[0], 2) if levels else None,
        "median_sqnr_db": round(levels[len(levels) // 2], 2) if levels else None,
    }
