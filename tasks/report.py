"""The report of a run, made from what the stages left: report.md, sqnr.png and run.json in the run's folder."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from distribute.job import read_json, write_json
from distribute.sizes import format_size
from tasks.export import CHECKPOINT, export_step
from tasks.plots import plot_sqnr
from tasks.quantize import quantize_step
from tasks.run import Run
from tasks.stage import StageResult
from tasks.verify import verify_step

WORST = 10
PLOT = "sqnr.png"


@dataclass(frozen=True)
class Report:
    """What a person reads, and what a program reads."""

    markdown: str
    worst: list[dict[str, Any]]  # rows of the table: tensor, codec, SQNR (dB)
    summary: dict[str, Any]
    folder: Path


def report(run: Run, stages: Sequence[StageResult], receipt: dict[str, Any] | None) -> Report:
    """Write the run's folder and return what it says."""
    plan = read_json(quantize_step(run).folder / "plan.json")
    coverage = read_json(quantize_step(run).folder / "coverage.json")
    verdict = read_json(verify_step(run).folder / "verify.json")
    summary = summarize(run, stages, receipt, plan=plan, verdict=verdict)
    worst = worst_tensors(verdict["tensors"])
    markdown = make_markdown(summary, plan=plan, worst=worst, coverage=coverage)
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "report.md").write_text(markdown, encoding="utf-8")
    plot_sqnr(verdict["tensors"], run.folder / PLOT, title=f"{run.source.address}, {run.recipe.preset}")
    write_json(run.folder / "run.json", summary)
    return Report(markdown, worst, summary, run.folder)


def summarize(
    run: Run,
    stages: Sequence[StageResult],
    receipt: dict[str, Any] | None,
    *,
    plan: dict[str, Any],
    verdict: dict[str, Any],
) -> dict[str, Any]:
    """The run as JSON: what `--json` prints and run.json holds."""
    levels = [tensor["sqnr_db"] for tensor in verdict["tensors"] if tensor["sqnr_db"] is not None]
    size = sum(file["size"] for file in plan["files"])
    return {
        "run_id": run.run_id,
        "model": run.source.address,
        "recipe": run.recipe.model_dump(mode="json"),
        "calibration": run.data.address if run.data else None,
        "calibration_amounts": _amounts(run, stages) if run.data else None,
        "checkpoint": str(export_step(run).folder / CHECKPOINT),
        "address": receipt["address"] if receipt else None,
        "revision": receipt["revision"] if receipt else None,
        "uploaded_bytes": receipt["uploaded_bytes"] if receipt else None,
        "upload_seconds": receipt["seconds"] if receipt else None,
        "source_bytes": plan["source_bytes"],
        "bytes": size,
        "ratio": round(size / plan["source_bytes"], 4),
        "files": len(verdict["files"]),
        "worst_sqnr_db": round(min(levels), 2) if levels else None,
        "stages": [_stage_row(stage) for stage in stages],
        "warnings": list(dict.fromkeys(text for stage in stages for text in stage.figures.get("warnings", []))),
        "report": str(run.folder / "report.md"),
    }


def worst_tensors(tensors: Iterable[dict[str, Any]], count: int = WORST) -> list[dict[str, Any]]:
    """The rows with the lowest SQNR; exact tensors (None) are never among them."""
    lossy = [tensor for tensor in tensors if tensor["sqnr_db"] is not None]
    return [
        {"tensor": tensor["name"], "codec": tensor["codec"], "SQNR (dB)": round(tensor["sqnr_db"], 2)}
        for tensor in sorted(lossy, key=lambda tensor: tensor["sqnr_db"])[:count]
    ]


def make_markdown(
    summary: dict[str, Any], *, plan: dict[str, Any], worst: list[dict[str, Any]], coverage: dict[str, list[int]]
) -> str:
    """The whole report as Markdown. `coverage`: tokens of each expert by block."""
    recipe = summary["recipe"]
    published = summary["address"] or "not published"
    if summary["revision"]:
        published += f" at {summary['revision']}"
    facts = [
        {"what": "source", "value": f"{summary['model']}, {format_size(summary['source_bytes'])}"},
        {"what": "checkpoint", "value": f"{summary['checkpoint']}, {format_size(summary['bytes'])}"},
        {"what": "size against source", "value": f"{summary['ratio']:.1%}"},
        {"what": "published", "value": published},
        {"what": "calibration text", "value": summary["calibration"] or "none needed"},
    ]
    if amounts := summary["calibration_amounts"]:
        facts += [{"what": name.replace("_", " "), "value": value} for name, value in amounts.items()]
    stages = [_readable_stage(stage) for stage in summary["stages"]]
    if summary["address"]:
        stages.append(_upload_row(summary))
    parts = [
        f"# {summary['model']}: {recipe['preset']}, {recipe['dialect']}",
        _table(facts),
        f"## What was quantized\n\n{_table(_decision_rows(plan['decisions']))}",
        *([f"## Tokens of experts\n\n{_table(_coverage_rows(coverage))}"] if coverage else []),
        f"## Worst {len(worst)} tensors\n\n{_table(worst)}",
        f"## SQNR by layer\n\n![SQNR by layer]({PLOT})",
        f"## Stages\n\n{_table(stages)}",
    ]
    if summary["warnings"]:
        parts.append("## Warnings\n\n" + "\n".join(f"- {text}" for text in summary["warnings"]))
    return "\n\n".join(parts) + "\n"


def _decision_rows(decisions: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for decision in decisions:
        size = decision.get("group_size")
        preset = f"{decision.get('preset', '')}{f', groups of {size}' if size else ''}"
        groups[decision["action"], preset, decision["reason"]].append(decision["module"])
    return [
        {"action": action, "preset": preset, "why": reason, "modules": len(modules), "for example": modules[0]}
        for (action, preset, reason), modules in groups.items()
    ]


def _coverage_rows(coverage: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [
        {"block": block, "experts": len(tokens), "least": min(tokens), "median": median(tokens), "most": max(tokens),
         "without any": tokens.count(0)}
        for block, tokens in coverage.items()
    ]  # fmt: skip


def _stage_row(stage: StageResult) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "key": stage.key,
        "folder": str(stage.folder),
        "reused": stage.reused,
        "reason": stage.reason,
        "seconds": stage.seconds,
        "peak_memory_bytes": list(stage.peak_memory_bytes),
        "figures": stage.figures,
    }


def _readable_stage(row: dict[str, Any]) -> dict[str, Any]:
    memory = ", ".join(format_size(value) for value in row["peak_memory_bytes"])
    why = "reused; seconds and memory are of the run that made it" if row["reused"] else f"built: {row['reason']}"
    return {"stage": row["stage"], "seconds": row["seconds"], "peak memory of each rank": memory, "how": why}


def _upload_row(summary: dict[str, Any]) -> dict[str, Any]:
    sent = format_size(summary["uploaded_bytes"])
    return {
        "stage": "upload",
        "seconds": round(summary["upload_seconds"], 3),
        "peak memory of each rank": "no ranks",
        "how": f"sent {sent}",
    }


def _amounts(run: Run, stages: Iterable[StageResult]) -> dict[str, int]:
    """How much was measured: what calibrate counted, else what was asked for."""
    counted = next((stage.figures for stage in stages if stage.stage == "calibrate"), {})
    asked = asdict(run.calibration)
    names = ("samples", "tokens", "sequence_length", "seed")
    return {name: value for name in names if (value := counted.get(name, asked.get(name))) is not None}


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of rows with the same keys."""
    if not rows:
        return "none"
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)


def _escape(cell: str) -> str:
    """Text that Markdown shows as it is: recipe patterns hold stars."""
    return cell.replace("|", "\\|").replace("*", "\\*")
