"""Text on disk, read piece by piece: blocks of .txt files, rows of .jsonl and .parquet files.

Knows files and their faults, no tokenizer. Only the pieces that are asked for are read, so a file may be larger
than memory. Every fault is a DataError that names the file and, where there is one, the line.
"""

import codecs
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow
from pyarrow import parquet

from distribute.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".parquet")
#: Characters. A script that writes no spaces may be cut anywhere.
_LONG_WORD = 32


def data_files(path: Path) -> list[Path]:
    """The file at `path`, or the files of one kind in the folder `path`, sorted by name.

    Raises:
        DataError: there is no such file, it is empty or of another kind, or the folder mixes kinds.
    """
    with _explained(path):
        if not path.exists():
            raise DataError(f"calibration text {path} does not exist")
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
        num_bytes = sum(file.stat().st_size for file in files)
    kinds = sorted({file.suffix for file in files})
    if len(kinds) != 1 or kinds[0] not in SUFFIXES:
        given = "several kinds of file" if len(kinds) > 1 else kinds[0] if kinds and kinds[0] else "no such ending"
        raise DataError(f"calibration text {path} has {given}; give files of one kind: {', '.join(SUFFIXES)}")
    if num_bytes == 0:
        raise DataError(f"calibration text {path} is empty")
    return files


class TextBlocks:
    """Text files as blocks of `block_bytes` bytes, in order. The last block of a file may be shorter."""

    def __init__(self, files: Sequence[Path], *, block_bytes: int):
        self._bytes = block_bytes
        self._blocks = [(file, offset) for file in files for offset in range(0, file.stat().st_size, block_bytes)]

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, index: int) -> str:
        """One block from its first whole word on; raises DataError when it is not UTF-8."""
        path, offset = self._blocks[index]
        with _explained(path), path.open("rb") as file:
            file.seek(offset)
            block = file.read(self._bytes)
            # At most three bytes belong to a character that began before the block.
            lead = next((at for at, byte in enumerate(block[:4]) if byte & 0xC0 != 0x80), 0) if offset else 0
            text = codecs.getincrementaldecoder("utf-8-sig")().decode(block[lead:])
        return text[text.find(" ", 0, _LONG_WORD) + 1 :] if offset else text


def read_text(path: Path) -> str:
    """A whole text file; raises DataError when it is not UTF-8."""
    with _explained(path):
        return path.read_text(encoding="utf-8-sig")


class Rows(Protocol):
    """Records of one file, numbered from 0."""

    def __len__(self) -> int: ...

    def take(self, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, record) for each of `indices`, which ascend."""
        ...


def open_rows(path: Path, fields: Sequence[str]) -> Rows:
    """The rows of a .jsonl or .parquet file; of a parquet file only `fields` are read."""
    with _explained(path):
        return ParquetRows(path, fields) if path.suffix == ".parquet" else JsonRows(path)


class JsonRows:
    """The lines of a .jsonl file that are not blank."""

    def __init__(self, path: Path):
        self._path = path
        self._lines, self._offsets = array("q"), array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._lines.append(number)
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `Rows.take`; raises DataError with the line number of a broken line."""
        with _explained(self._path), self._path.open("rb") as file:
            for index in indices:
                file.seek(self._offsets[index])
                try:
                    record = json.loads(file.readline())
                except ValueError as error:
                    raise DataError(
                        f"calibration text {self._path} line {self._lines[index]} is not JSON ({error}); "
                        "each line must hold one JSON object"
                    ) from None
                yield index, record if isinstance(record, dict) else {}


class ParquetRows:
    """The rows of a .parquet file, of which only `fields` are read."""

    def __init__(self, path: Path, fields: Sequence[str]):
        self._path = path
        with _explained(path):
            self._file = parquet.ParquetFile(path)
        self._fields = [name for name in fields if name in self._file.schema_arrow.names]

    def __len__(self) -> int:
        return self._file.metadata.num_rows

    def take(self, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `Rows.take`. One row group at a time is in memory."""
        if not self._fields:
            yield from ((index, {}) for index in indices)
            return
        begin, position = 0, 0
        for group in range(self._file.num_row_groups):
            end = begin + self._file.metadata.row_group(group).num_rows
            wanted = position
            while position < len(indices) and indices[position] < end:
                position += 1
            if position > wanted:
                yield from self._take_from(group, begin, indices[wanted:position])
            begin = end

    def _take_from(self, group: int, begin: int, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        with _explained(self._path):
            table = self._file.read_row_group(group, columns=self._fields)
            records = table.take([index - begin for index in indices]).to_pylist()
        yield from zip(indices, records, strict=True)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Faults of the file system and of file formats become one sentence."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"calibration text {path} is not UTF-8 ({error.reason}); convert it to UTF-8") from None
    except pyarrow.ArrowException as error:
        raise DataError(f"calibration text {path} is not a readable parquet file: {_first_line(error)}") from None
    except OSError as error:
        raise DataError(f"calibration text {path} cannot be read: {error.strerror or _first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
