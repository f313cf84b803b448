"""Tables of `nogather plan` and `nogather inspect`: aligned plain text, as good in a pipe as on a terminal."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from distribute.layers import KEEP
from distribute.plan import Plan
from distribute.sizes import format_size
from distribute.source import Checkpoint, text_config

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
    table = list(rows)
    cells = [list(map(str, row)) for row in table]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [bool(table) and isinstance(table[0][i], int) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def plan_text(plan: Plan) -> str:
    """What becomes what: every tensor, every kept module with its reason, every file, and the sizes."""
    tensors = [
        (o.name, o.dtype, "x".join(map(str, o.shape)) or "scalar", o.codec, o.file, o.end - o.begin)
        for o in plan.outputs
    ]
    kept = [(d.module, d.reason) for d in plan.decisions if d.action == KEEP]
    files = [(file.name, file.size) for file in plan.files]
    parts = [
        align(("tensor", "dtype", "shape", "codec", "file", "bytes"), tensors),
        "kept as they are\n" + align(("module", "why"), kept),
        align(("file", "bytes"), files),
        *(f"not written: {name} (tied to the embedding)" for name in plan.dropped),
        *(f"warning: {warning}" for warning in plan.warnings),
        f"{len(plan.quantized)} of {len(plan.decisions)} modules are quantized ({plan.recipe.preset}, "
        f"{plan.recipe.dialect}); {format_size(plan.source_bytes)} become {format_size(plan.nbytes)} "
        f"({plan.nbytes / max(1, plan.source_bytes):.1%}) in {len(plan.files)} files",
    ]
    return "\n\n".join(parts)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan for machines: plan.json with the sizes on top."""
    values = {key: value for key, value in plan.to_json().items() if key != "outputs"}
    return {"bytes": plan.nbytes} | values


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
