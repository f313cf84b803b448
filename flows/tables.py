"""Tables of `nogather plan` and `nogather inspect`: aligned plain text, as good in a pipe as on a terminal."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from distribute.layers import KEEP
from distribute.plan import Plan
from distribute.sizes import format_size
from distribute.source import Checkpoint, text_config
from distribute.work import Spread

if TYPE_CHECKING:  # it draws, and the library for that takes a second
    from tasks.sensitivity import Chosen

NAMED_KEYS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_experts",
    "num_local_experts",
)


def align(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns separated by two spaces; numbers (int) to the right."""
    return "\n".join(aligned(header, list(rows)))


def aligned(header: Sequence[str], table: Sequence[Sequence[Any]]) -> Iterator[str]:
    """The lines of `align`."""
    widths = [max(map(len, map(str, column))) for column in zip(header, *table, strict=True)]
    right = [bool(table) and isinstance(table[0][i], int) for i in range(len(header))]
    for line in chain([header, ["-" * width for width in widths]], table):
        yield "  ".join(
            str(value).rjust(width) if is_right else str(value).ljust(width)
            for value, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()


def plan_lines(plan: Plan, work: Spread | None = None) -> Iterator[str]:
    """What becomes what: every tensor, every kept module with its reason, every file, and the sizes.

    `work` adds how the export spreads over ranks.
    """
    shapes = cache(lambda shape: "x".join(map(str, shape)) or "scalar")
    tensors = [(o.name, o.dtype, shapes(o.shape), o.codec, o.file, o.nbytes) for o in plan.outputs]
    yield from aligned(("tensor", "dtype", "shape", "codec", "file", "bytes"), tensors)
    yield from ("", "kept as they are")
    yield from aligned(("module", "why"), [(d.module, d.reason) for d in plan.decisions if d.action == KEEP])
    yield ""
    yield from aligned(("file", "bytes"), [(file.name, file.size) for file in plan.files])
    for name in plan.dropped:
        yield from ("", f"not written: {name} (tied to the embedding)")
    for warning in plan.warnings:
        yield from ("", f"warning: {warning}")
    if work is not None:
        yield ""
        rows = [(what, *(format_size(figures[key]) for key in ("busiest", "mean")), f"{figures['ratio']:.3f}")
                for what, figures in work.summary().items()]  # fmt: skip
        yield from aligned((f"over {len(work.encoded)} ranks", "busiest", "mean", "ratio"), rows)
        yield f"a rank writes into {max(work.files)} files at most; a file is read for its digest by one rank"
    yield ""
    yield (
        f"{len(plan.quantized)} of {len(plan.decisions)} modules are quantized ({plan.recipe.preset}, "
        f"{plan.recipe.dialect}); {format_size(plan.source_bytes)} become {format_size(plan.nbytes)} "
        f"({plan.nbytes / max(1, plan.source_bytes):.1%}) in {len(plan.files)} files"
    )


def plan_json(plan: Plan, work: Spread | None = None) -> dict[str, Any]:
    """The plan for machines: plan.json with the sizes on top, and how the export spreads over ranks."""
    values = {key: value for key, value in plan.to_json().items() if key != "outputs"}
    spread = {"ranks": len(work.encoded), **work.summary(), "most_files_of_a_rank": max(work.files)} if work else None
    return {"bytes": plan.nbytes} | ({"spread": spread} if spread else {}) | values


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint folder holds, from its headers."""
    dtypes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    files: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for entry in checkpoint.tensors.values():
        for group in (dtypes[entry.dtype], files[entry.file]):
            group[0] += 1
            group[1] += entry.nbytes
    text = text_config(checkpoint.config)
    return {
        "folder": str(checkpoint.folder),
        "architectures": checkpoint.config.get("architectures"),
        **{key: text[key] for key in NAMED_KEYS if key in text},
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.nbytes,
        "dtypes": {dtype: {"tensors": n, "bytes": size} for dtype, (n, size) in sorted(dtypes.items())},
        "files": {file: {"tensors": n, "bytes": size} for file, (n, size) in sorted(files.items())},
        "quantization": checkpoint.config.get("quantization_config"),
        "warnings": list(checkpoint.warnings),
    }


def checkpoint_text(facts: dict[str, Any]) -> str:
    """`describe_checkpoint` for people."""
    plain = [(key, value) for key, value in facts.items() if not isinstance(value, dict | list) and value is not None]
    plain += [
        ("architectures", ", ".join(facts["architectures"] or ["?"])),
        ("size", format_size(facts["bytes"])),
    ]
    parts = [align(("what", "value"), [(key, str(value)) for key, value in plain])]
    for title in ("dtypes", "files"):
        groups = [(name, group["tensors"], group["bytes"]) for name, group in facts[title].items()]
        parts.append(align((title, "tensors", "bytes"), groups))
    block = facts["quantization"]
    if isinstance(block, dict):
        rows = [(key, str(value)) for key, value in block.items() if not isinstance(value, dict | list)]
        parts.append("quantized\n" + align(("key", "value"), rows))
    else:
        parts.append("not quantized")
    return "\n\n".join([*parts, *(f"warning: {warning}" for warning in facts["warnings"])])


def sensitivity_json(chosen: "Chosen") -> dict[str, Any]:
    """What was measured and chosen, for machines."""
    return {
        "recipe": chosen.run.recipe.model_dump(mode="json"),
        "mean_bits": chosen.allocation.bits,
        "error": chosen.allocation.error,
        "groups": [
            {"names": list(group.names), "weights": group.weights, "chosen": choice.preset,
             "choices": {one.preset: {"bits": one.bits / group.weights, "error": one.error} for one in group.choices}}
            for group, choice in zip(chosen.table.groups, chosen.allocation.choices, strict=True)
        ],
        "folder": str(chosen.run.folder),
    }  # fmt: skip


def sensitivity_text(chosen: "Chosen") -> str:
    """`sensitivity_json` for people: a line a group with the error of each preset, the chosen one marked."""
    presets = list(dict.fromkeys(choice.preset for group in chosen.table.groups for choice in group.choices))
    rows = []
    for group, picked in zip(chosen.table.groups, chosen.allocation.choices, strict=True):
        errors = {choice.preset: f"{choice.error:.1e}" for choice in group.choices}
        cells = [f"{errors.get(preset, '-')}{' *' if preset == picked.preset else '  '}" for preset in presets]
        rows.append((group.names[0], len(group.names), *cells))
    counts = ", ".join(f"{count} groups {preset}" for preset, count in chosen.counts.items())
    return "\n".join(
        [
            align(("first layer of the group", "layers", *presets), rows),
            "",
            f"* chosen: {counts}; {chosen.allocation.bits:.3f} bits a weight in the mean",
            f"recipe   {chosen.recipe_path}",
            f"report   {chosen.report_path}",
        ]
    )
