"""Writing the rows a rank owns: read from its local part, coded if need be, put at their final offset of a file.

No row changes ranks here, except those of tensors that are cut across rows: these are redistributed first, tensor
by tensor and block by block.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from distribute.control import Control
from distribute.errors import UserError
from distribute.live.collect import Meshes, StateTensor
from distribute.live.encode import FORMATS
from distribute.live.layout import Ranges, Run, lies_in_rows, owned_rows, row_runs, rows_and_width
from distribute.live.plan import LivePlan, Target
from distribute.live.redistribute import full_rows, local_rows
from distribute.shards import write_range
from distribute.source import TensorEntry
from distribute.tensors import to_bytes
from distribute.work import PIECE_BYTES

OPEN_FILES = 64  # at once: a checkpoint may have thousands, a process often may not open 1,024


class Writer:
    """Write-only descriptors of a checkpoint's files: opened on use, flushed and closed at the end at the latest."""

    def __init__(self, folder: Path, on_bytes: Callable[[int], None]):
        self._folder = folder
        self._on_bytes = on_bytes
        self._fds: dict[str, int] = {}

    def write(self, output: TensorEntry, row: int, rows: Tensor) -> None:
        """Write `rows` at flat row `row` of an output; a row of the output has as many bytes as one of `rows`."""
        data = to_bytes(rows)
        per_row = len(data) // rows.shape[0] if rows.dim() else len(data)
        begin = output.begin + row * per_row
        assert output.begin <= begin and begin + len(data) <= output.end, (output, row, rows.shape)
        write_range(self._open(output.file), data, begin)
        self._on_bytes(len(data))

    def _open(self, file: str) -> int:
        """The descriptor of a file, which is then the last used."""
        if file not in self._fds:
            if len(self._fds) == OPEN_FILES:
                self._close(next(iter(self._fds)), flush=True)
            self._fds[file] = os.open(self._folder / file, os.O_WRONLY)
        self._fds[file] = fd = self._fds.pop(file)
        return fd

    def _close(self, file: str, *, flush: bool) -> None:
        fd = self._fds.pop(file)
        try:
            if flush:
                os.fsync(fd)  # each host must flush its own writes
        finally:
            os.close(fd)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # all are closed, also when one cannot be flushed
            for file in list(self._fds):
                stack.callback(self._close, file, flush=error is None)


def write_rows(
    writer: Writer,
    plan: LivePlan,
    state: Mapping[str, StateTensor],
    meshes: Mapping[str, Meshes],
    *,
    control: Control,
    dtype: torch.dtype,
) -> None:
    """Write every row that this rank owns. Called by all ranks, with the same plan.

    Args:
        dtype: the model's; weights are rounded to it before they are coded.

    Raises:
        UserError: a weight that is to be coded holds NaN or infinity.
    """
    cut: list[tuple[StateTensor, tuple[Ranges, ...]]] = []
    for turn, name in enumerate(sorted(plan.targets)):
        tensor = state[name]
        owned = owned_rows(tensor.layout, meshes[name], turn)
        runs = row_runs(tensor.layout, tensor.mesh, control.rank)
        if not lies_in_rows(tensor.layout, meshes[name]):
            cut.append((tensor, owned))
            continue
        assert runs is not None
        for at, rows in _local_pieces(tensor, runs, owned[control.rank]):
            _write_piece(writer, plan.targets[name], at, rows, name=name, dtype=dtype)
    for tensor, owned in cut:  # last, and by all ranks in the same order: these wait for each other
        blocks = full_rows(tensor.local, tensor.layout, meshes[tensor.name], control, owned)
        for at, rows in blocks:
            _write_piece(writer, plan.targets[tensor.name], at, rows, name=tensor.name, dtype=dtype)


def write_values(writer: Writer, plan: LivePlan, control: Control) -> None:
    """Write the outputs that every rank knows, each by one of them. Called by all ranks."""
    entries = {output.name: output for output in plan.outputs}
    for turn, name in enumerate(sorted(plan.values)):
        if turn % len(control.members) == control.rank and plan.values[name].numel():
            writer.write(entries[name], 0, plan.values[name])


def _local_pieces(tensor: StateTensor, runs: Sequence[Run], owned: Sequence[range]) -> Iterator[tuple[range, Tensor]]:
    """(flat rows, tensor [rows, width]) of what this rank holds and owns, in pieces of bounded size."""
    if not tensor.local.numel():
        return
    width = rows_and_width(tensor.shape)[1]
    step = max(1, PIECE_BYTES // (width * tensor.local.element_size()))
    for run in runs:
        for span in owned:
            for start in range(max(run.start, span.start), min(run.stop, span.stop), step):
                at = range(start, min(start + step, run.stop, span.stop))
                begin = run.at + at.start - run.start
                yield at, local_rows(tensor.local, begin, begin + len(at))


def _write_piece(
    writer: Writer, targets: Sequence[Target], at: range, rows: Tensor, *, name: str, dtype: torch.dtype
) -> None:
    """Write flat rows `at` of a state tensor to every target that takes some of them."""
    for target in targets:
        start, stop = max(at.start, target.start), min(at.stop, target.stop)
        if start >= stop:
            continue
        part = rows[start - at.start : stop - at.start]
        row = target.row + start - target.start
        if target.encoding is None:
            writer.write(target.output, row, part)
            continue
        _refuse_non_finite(name, part)
        encoding = target.encoding
        span = range(row, row + stop - start)
        coded = FORMATS[encoding.format].encode(part, encoding.scales, span, dtype, encoding.group_size)
        for suffix, tensor in coded.items():
            writer.write(encoding.written[suffix], row, tensor)


def _refuse_non_finite(name: str, rows: Tensor) -> None:
    low, high = torch.aminmax(rows)  # NaN wins in both
    if not torch.isfinite(torch.stack([low, high])).all():
        raise UserError(f"{name} holds NaN or infinite values; repair the weights or leave them unquantized")
