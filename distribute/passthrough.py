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

from distribute.source import Checkpoint, is_inside

#: File names (any folder) that never travel.
LEFT_BEHIND = (
    "*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data",
    "*.ot", "*.tflite", "*.npz", "*.index.json", "*.tmp", "*.lock", "*.pkl", "*.pickle",
    "config.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json", "quant_config.json",
    "quant_log.csv", "recipe.yaml", "recipe.yml", "receipt.json",
)  # fmt: skip
#: Folders that hold a second copy of the weights.
LEFT_FOLDERS = ("original", "onnx", "gguf", "coreml", "openvino")


def side_files(folder: Path) -> list[str]:
    """Relative names (posix) of the files that go along, sorted. Links that lead outside the folder do not."""
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        parts = name.split("/")
        if any(part.startswith(".") for part in parts) or (parts[0] in LEFT_FOLDERS and len(parts) > 1):
            continue
        if path.is_file() and is_inside(folder, name) and not any(fnmatch(parts[-1], p) for p in LEFT_BEHIND):
            names.append(name)
    return names


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
