"""Rows of a source weight become the bytes of a quantized layer: what export writes and verify makes again.

Owns the way from stored rows to codes: rounding to the model's dtype, the smoothing of columns and rows, the codec.
What calibration decided is read as it is needed: values of the checkpoint from plan.safetensors, and parameters of
the algorithms (`PARAMETERS`) from files that the quantize stage left, one a decoder layer.

    <module>.smooth     fp32 [in]: the weight's columns are multiplied by it
    <module>.row_scale  fp32 [out]: the weight's rows are
    <module>.low, .high fp32 [out, groups]: the range that a group covers
    <module>.codes      int8 [out, in]: codes that GPTQ chose
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import ceil, prod
from pathlib import Path

import torch
from torch import Tensor

from distribute.errors import SourceError, StageError
from distribute.numerics.codec import Ranges
from distribute.numerics.table import find_codec
from distribute.plan import Output
from distribute.source import Checkpoint, TensorEntry, read_entries
from distribute.tensors import read_entry

PARAMETERS = "parameters"
VALUES = "plan.safetensors"
#: Before the name of a tensor of the checkpoint that takes up a smoothing: its new value.
FOLD = "fold."
#: Parameters that are not of the whole weight.
OF_ROWS = ("smooth", "row_scale", "low", "high", "codes")


def parameter_names(folder: Path) -> list[str]:
    """The files that algorithms left in a quantize stage's folder, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in (folder / PARAMETERS).glob("*.safetensors"))


class StageTensors:
    """Tensors in the named files of a stage's folder, of which single ones or rows are read when they are due.

    Raises:
        StageError: a file is damaged.
    """

    def __init__(self, folder: Path, names: Iterable[str]):
        self._folder = folder
        self._entries: dict[str, TensorEntry] = {}
        self._suffixes: dict[str, list[str]] = defaultdict(list)
        for name in names:
            self._add(name)

    @classmethod
    def of_plan(cls, folder: Path) -> "StageTensors":
        """Everything that the quantize stage left."""
        return cls(folder, [VALUES, *parameter_names(folder)])

    def read(self, name: str, rows: range | None = None) -> Tensor:
        """As `distribute.tensors.read_tensor`."""
        return read_entry(self._folder, self._entries[name], rows)

    def find(self, name: str, rows: range | None = None) -> Tensor | None:
        """As `read`; None when there is no such tensor."""
        return self.read(name, rows) if name in self._entries else None

    def of(self, module: str) -> dict[str, Tensor]:
        """Values of the whole weight of a module, by suffix."""
        return {s: self.read(f"{module}.{s}") for s in self._suffixes.get(module, ()) if s not in OF_ROWS}

    def _add(self, name: str) -> None:
        try:
            entries = read_entries(self._folder, name)
        except SourceError as error:
            raise StageError(f"{self._folder / name} is damaged ({error}); remove its folder and run again") from None
        for entry in entries:
            self._entries[entry.name] = entry
            module, _, suffix = entry.name.rpartition(".")
            self._suffixes[module].append(suffix)


def read_weight(
    output: Output,
    rows: range,
    checkpoint: Checkpoint,
    values: StageTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Rows [n, in] of the weight that `output` is coded from, in the model's dtype, smoothed."""
    assert output.source is not None, output
    entry = as_matrix(checkpoint.tensors[output.source])
    place = range(output.first_row + rows.start, output.first_row + rows.stop)
    weight = read_entry(checkpoint.folder, entry, place).to(device=device, dtype=dtype)
    smooth, row_scale = values.find(f"{output.module}.smooth"), values.find(f"{output.module}.row_scale", rows)
    return smoothed(weight, smooth=smooth, row_scale=row_scale)


def as_matrix(entry: TensorEntry) -> TensorEntry:
    """A tensor on disk seen as rows of its last dimension."""
    return replace(entry, shape=(prod(entry.shape[:-1]), entry.shape[-1]))


def smoothed(weight: Tensor, *, smooth: Tensor | None, row_scale: Tensor | None) -> Tensor:
    """Rows [n, in] times `smooth` fp32 [in] and `row_scale` fp32 [n], each product rounded to the weight's dtype."""
    if row_scale is not None:
        weight = (weight.to(torch.float32) * row_scale.to(weight.device)[:, None]).to(weight.dtype)
    if smooth is not None:
        weight = (weight.to(torch.float32) * smooth.to(weight.device)).to(weight.dtype)
    return weight


def encode_rows(output: Output, rows: range, weight: Tensor, values: StageTensors) -> dict[str, Tensor]:
    """Stored tensors of these rows of a module, by suffix. `weight` is what `read_weight` gave for them."""
    low, high = (values.find(f"{output.module}.{end}", rows) for end in ("low", "high"))
    codes = values.find(f"{output.module}.codes", rows)
    device = weight.device
    return find_codec(output.codec).encode(
        weight,
        {suffix: value.to(device) for suffix, value in values.of(output.module).items()},
        ranges=Ranges(low.to(device), high.to(device)) if low is not None and high is not None else None,
        codes=codes.to(device) if codes is not None else None,
    )


def rows_of(output: Output, rows: range) -> range:
    """Which rows of a stored tensor are made of these rows of the weight."""
    return range(rows.start // output.per, ceil(rows.stop / output.per))


def offset_of(output: Output, rows: range) -> int:
    """Where in the data of a stored tensor these rows of the weight begin, in bytes."""
    stored_rows = output.shape[0]
    return rows_of(output, rows).start * (output.nbytes // stored_rows)
