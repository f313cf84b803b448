"""Everything of a checkpoint that is not a weight: config.json edited, the rest copied byte for byte. Torch-free.

Nothing is loaded and saved again: a tokenizer or a generation config that is re-serialized is a changed one.
Weights in other formats, indexes, hidden files and what older quantization tools left stay behind.
"""

import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from distribute.source import INDEX_NAME, Checkpoint, is_inside

#: Weights in any form, and what belongs to them: never travels, in no folder.
WEIGHTS = (
    "*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
    "*.ot", "*.tflite", "*.npz", "*.index.json", "*.pkl", "*.pickle", "*.tmp", "*.lock", "adapter_*", "consolidated*",
)  # fmt: skip
#: Files of the checkpoint itself that export writes, or that an older export or tool left.
OWN_FILES = (
    "config.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json", "quant_config.json",
    "quant_log.csv", "recipe.yaml", "recipe.yml", "receipt.json", "SHA256SUMS",
)  # fmt: skip
#: Folders that hold a second copy of the weights.
SECOND_COPIES = ("original", "onnx", "gguf", "coreml", "openvino")
JSON_FILES = ("config.json", "hf_quant_config.json", INDEX_NAME)


def side_files(folder: Path) -> list[str]:
    """Relative names (posix) of the files that go along, sorted. Links that lead outside the folder do not."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in paths)
    return [name for name in names if _travels(name) and is_inside(folder, name)]


def checkpoint_files(folder: Path) -> list[str]:
    """Relative names of all that makes up a written checkpoint: weights, its JSON files and side files, sorted."""
    weights = {entry.file for entry in Checkpoint.open(folder).tensors.values()}
    return sorted({*weights, *(name for name in JSON_FILES if (folder / name).is_file()), *side_files(folder)})


def _travels(name: str) -> bool:
    *folders, _ = parts = name.split("/")
    if any(part.startswith(".") for part in parts) or (folders and folders[0] in SECOND_COPIES):
        return False
    if any(fnmatch(part, pattern) for part in parts for pattern in WEIGHTS):
        return False
    return bool(folders) or name not in OWN_FILES


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy the side files and return their names."""
    names = side_files(source)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def write_config(checkpoint: Checkpoint, target: Path, changes: Mapping[str, Any]) -> None:
    """Write the source's own config.json with `changes` on top."""
    write_json_text(target / "config.json", {**checkpoint.config, **changes})


def write_json_text(path: Path, value: Any, indent: int = 2) -> None:
    """Write JSON as people find it in checkpoints: indented, UTF-8, a line end at the end."""
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
