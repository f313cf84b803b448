"""The source checkpoint: a folder with config.json and safetensors files, read by headers only. Torch-free.

Owns which file holds which tensor: the index decides, never a listing. Every path that comes from a file is
checked before it is opened, and every weight file is checked for completeness, so that a damaged source is
refused in seconds instead of after hours. Never reads tensor data except to compare a tied head.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from sys import intern
from typing import Any

from distribute.errors import SourceError
from distribute.job import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
#: Bytes of one element by safetensors dtype name, in the order in which the reference serializer lays dtypes out.
ITEMSIZE = {
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E8M0": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
#: Files and tensor suffixes that only a quantized checkpoint has.
QUANTIZED_SUFFIXES = (
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".qweight",
    ".qzeros",
)
#: Output heads that may be tied to the input embedding, and the embeddings they are tied to.
HEAD_SUFFIXES = ("lm_head.weight", "embed_out.weight", "output_layer.weight")
EMBEDDING_SUFFIXES = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies. `begin` and `end` are absolute byte offsets in `file` (relative to the folder)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Checkpoint:
    """A readable source. `warnings` are one sentence each; `skipped` are weight files the index does not name."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    warnings: tuple[str, ...] = field(default=())
    skipped: tuple[str, ...] = field(default=())

    @classmethod
    def open(cls, folder: Path | str) -> "Checkpoint":
        """Read config, index and all headers.

        Raises:
            SourceError: not a checkpoint, or a file is missing, cut short, damaged or outside the folder.
        """
        folder = Path(folder)
        config = read_config(folder)
        weight_map = _weight_map(folder)
        files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
        headers = _read_headers(folder, files)
        tensors, warnings = _choose(headers, weight_map)
        skipped = _stray_weights(folder, files)
        if skipped:
            warnings.append(f"weight files that the index does not name are not read: {', '.join(skipped)}")
        return cls(folder, config, tensors, tuple(warnings), tuple(skipped))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def digest(self) -> str:
        """Names this source for caching: config, every header entry, and every file's size and time."""
        files = sorted({entry.file for entry in self.tensors.values()})
        stats = [
            (name, (self.folder / name).stat().st_size, (self.folder / name).stat().st_mtime_ns) for name in files
        ]
        entries = sorted(self.tensors.values(), key=lambda entry: entry.name)
        digest = hashlib.sha256(f"[{json.dumps(self.config, sort_keys=True)}, [".encode())
        for place, e in enumerate(entries):  # one by one: the text of a large model takes hundreds of megabytes
            text = json.dumps((e.name, e.dtype, e.shape, e.file, e.begin, e.end))
            digest.update((f", {text}" if place else text).encode())
        digest.update(f"], {json.dumps(stats, sort_keys=True)}]".encode())
        return digest.hexdigest()

    def refuse_quantized(self) -> None:
        """Raise SourceError when this checkpoint is quantized already."""
        found = _quantized_form(self)
        if found:
            raise SourceError(
                f"{self.folder} is already quantized ({found}); quantizing it again would damage it: "
                "give the original checkpoint in bf16, fp16 or fp32, or dequantize this one first"
            )

    def tied_copies(self) -> tuple[str, ...]:
        """Names of heads that repeat their tied embedding and are therefore not written again.

        Raises:
            SourceError: config.json says tied, but the stored head differs from the embedding.
        """
        if not text_config(self.config).get("tie_word_embeddings", self.config.get("tie_word_embeddings", False)):
            return ()
        heads = [name for name in self.tensors if name.endswith(HEAD_SUFFIXES)]
        embeddings = [name for name in self.tensors if name.endswith(EMBEDDING_SUFFIXES)]
        if not embeddings:
            return ()  # the head is the only copy
        for head in heads:
            if not any(_same_data(self, head, embedding) for embedding in embeddings):
                raise SourceError(
                    f"config.json says tie_word_embeddings, but {head} differs from the embedding: "
                    "set tie_word_embeddings to false in config.json if the stored head is the right one, "
                    f"or remove {head}"
                )
        return tuple(heads)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; SourceError when there is none or it is not an object."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder; give the folder of a Hugging Face checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise SourceError(f"{folder} holds no config.json; give the folder of a Hugging Face checkpoint")
    return _read_object(path)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model."""
    nested = config.get("text_config") or config.get("llm_config")
    return nested if isinstance(nested, dict) else config


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(header object, byte offset of the data) of one safetensors file; SourceError when damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if length < 2 or length > MAX_HEADER_BYTES:
            raise SourceError(f"{path.name}: not a safetensors file")
        if 8 + length > size:
            raise SourceError(f"{path.name}: truncated inside its header ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise SourceError(f"{path.name}: its header is not JSON") from None
    if not isinstance(header, dict):
        raise SourceError(f"{path.name}: its header is not a JSON object")
    return header, 8 + length


def read_entries(folder: Path, file: str) -> list[TensorEntry]:
    """All tensors of one file, checked against its size."""
    path = folder / file
    header, data = read_header(path)
    size = path.stat().st_size
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # few in a model of many tensors: one object for each
    entries = [_entry(file, name, fields, data, shapes) for name, fields in header.items() if name != "__metadata__"]
    end = data
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise SourceError(f"{file}: its header leaves a gap or an overlap at byte {end}")
        end = entry.end
    if end > size:
        raise SourceError(f"{file}: truncated, {size} of {end} bytes")
    return entries


def is_inside(folder: Path, name: str) -> bool:
    """Whether `name`, a file name from an index, stays inside `folder`; links into a Hub cache's blobs are legal."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not name:
        return False
    real, root = (folder / name).resolve(), folder.resolve()
    if real.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")


def _entry(
    file: str, name: str, fields: Any, data: int, shapes: dict[tuple[int, ...], tuple[int, ...]]
) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        expected = prod(shape) * ITEMSIZE[dtype]
        if not all(type(number) is int for number in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise SourceError(f"{file}: the entry of {name!r} is damaged or of an unknown dtype: {fields}") from None
    if not 0 <= begin <= end or end - begin != expected or min(shape, default=0) < 0:
        raise SourceError(f"{file}: {name!r} is {dtype} {list(shape)} but holds {end - begin} bytes")
    return TensorEntry(name, intern(dtype), shapes.setdefault(shape, shape), file, data + begin, data + end)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{path} must hold a JSON object")
    return value


def _weight_map(folder: Path) -> dict[str, str] | None:
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).exists():
            return None
        raise SourceError(f"{folder} holds neither {INDEX_NAME} nor {SINGLE_NAME}; only safetensors is read")
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index} has no weight_map")
    strings = {value for value in weight_map.values() if isinstance(value, str)}  # few: a look at the disk for each
    outside = {name for name in strings if not is_inside(folder, name)}
    bad = sorted(outside | {str(value) for value in weight_map.values() if not isinstance(value, str)})
    if bad:
        raise SourceError(f"{index} names files outside its folder: {', '.join(bad)}; nothing was read from them")
    return weight_map


def _read_headers(folder: Path, files: Iterable[str]) -> dict[str, list[TensorEntry]]:
    """Entries per file; one error lists every missing or damaged file."""
    headers: dict[str, list[TensorEntry]] = {}
    faults: list[str] = []
    for file in files:
        if not is_inside(folder, file):
            faults.append(f"{file}: leads outside the folder")
        elif not (folder / file).is_file():
            faults.append(f"{file}: missing")
        else:
            try:
                headers[file] = read_entries(folder, file)
            except SourceError as error:
                faults.append(str(error))
    if faults:
        raise SourceError(f"{folder} cannot be read: {'; '.join(faults)}; download these files again")
    return headers


def _choose(
    headers: Mapping[str, list[TensorEntry]], weight_map: Mapping[str, str] | None
) -> tuple[dict[str, TensorEntry], list[str]]:
    """The copy of each tensor that the index points at, and warnings for the copies that it does not."""
    found: dict[str, TensorEntry] = {}
    warnings: list[str] = []
    for file, entries in headers.items():
        for entry in entries:
            if weight_map is not None and weight_map.get(entry.name) != file:
                where = weight_map.get(entry.name)
                reason = f"the index takes it from {where}" if where else "the index does not name it"
                warnings.append(f"{entry.name} in {file} is ignored: {reason}")
            else:
                found[entry.name] = entry
    missing = sorted(set(weight_map or ()) - set(found))
    if missing:
        shown = ", ".join(missing[:5])
        raise SourceError(f"the index names {len(missing)} tensors that its files do not hold, for example {shown}")
    return dict(sorted(found.items())), warnings


def _stray_weights(folder: Path, files: Iterable[str]) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors") if path.name not in set(files))


def _quantized_form(checkpoint: Checkpoint) -> str:
    block = checkpoint.config.get("quantization_config") or text_config(checkpoint.config).get("quantization_config")
    if block:
        keys = ("quant_method", "quant_algo", "format", "fmt")
        known = isinstance(block, dict) and [block[key] for key in keys if key in block]
        return ", ".join(map(str, known or ["quantization_config in config.json"]))
    if (checkpoint.folder / "hf_quant_config.json").exists():
        return "hf_quant_config.json"
    for entry in checkpoint.tensors.values():
        if entry.name.endswith(QUANTIZED_SUFFIXES) or entry.dtype in ("F8_E4M3", "F8_E5M2"):
            return f"{entry.name} is {entry.dtype}"
    return ""


def _same_data(checkpoint: Checkpoint, first: str, second: str) -> bool:
    a, b = checkpoint.tensors[first], checkpoint.tensors[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(x == y for x, y in zip(_chunks(checkpoint, a), _chunks(checkpoint, b), strict=True))


def _chunks(checkpoint: Checkpoint, entry: TensorEntry, size: int = 1 << 24) -> Iterator[bytes]:
    with (checkpoint.folder / entry.file).open("rb") as file:
        file.seek(entry.begin)
        for left in range(entry.nbytes, 0, -size):
            yield file.read(min(size, left))
