"""Calibration samples: token ids of a local text file, chosen by a seed.

Every rank makes the same samples for itself; nothing here depends on a rank or the world size. Nothing is padded:
samples keep their own length, and only samples of equal length share a batch, so no padding can enter a statistic
and a tokenizer needs no pad token. The tokenizer is only read, never saved.
"""

import hashlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distribute.encoder import FIELDS, Encoder, load_tokenizer
from distribute.errors import DataError, SourceError
from distribute.job import read_json
from distribute.rows import TextBlocks, data_files, open_rows, read_text

#: Bytes of text that hold one token at least, with few exceptions: English has four to five bytes a token.
_BYTES_PER_TOKEN = 8
#: A median below it says that the rows are not running text.
_SHORT_TOKENS = 8


@dataclass(frozen=True)
class Samples:
    """`tokens`: one int64 tensor [length] a sample. `report`: JSON figures of calibration.json."""

    tokens: list[Tensor]
    report: dict[str, Any]


def read_samples(
    path: Path,
    *,
    model: Path,
    samples: int = 512,
    sequence_length: int = 512,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Samples:
    """Choose up to `samples` samples of up to `sequence_length` tokens from a file, or a folder of files.

    A .txt file is cut into windows of exactly `sequence_length` tokens; a text too short for one window is one
    sample. A row of a .jsonl or .parquet file is one sample, cut off at `sequence_length`; its text is the field
    `text` or `content`, or `messages` through the chat template. Rows that are not chosen are not looked at.

    Raises:
        DataError: the text cannot be read or holds nothing usable, or does not fit the model in folder `model`.
    """
    limits = _Limits.of(model)
    limits.check_length(sequence_length)
    if samples < 1:
        raise DataError(f"{samples} samples were asked for; calibration needs at least 1")
    files = data_files(path)
    encoder = Encoder(load_tokenizer(model, trust_remote_code=trust_remote_code), sequence_length)
    read = _read_windows if files[0].suffix == ".txt" else _read_rows
    chosen = read(files, path, encoder, samples, seed)
    limits.check_ids(chosen, encoder.tokenizer)
    return Samples([torch.tensor(ids, dtype=torch.int64) for ids in chosen], {
        "samples": len(chosen),
        "tokens": sum(map(len, chosen)),
        "sequence_length": sequence_length,
        "data_digest": digest_of(chosen),
        "warnings": _warnings(chosen, samples, path, encoder.tokenizer),
    })  # fmt: skip


def batches(samples: Sequence[Tensor], batch_size: int) -> list[Tensor]:
    """Stack samples of equal length to int64 [n <= batch_size, length], the longest first. Pure."""
    by_length: dict[int, list[Tensor]] = defaultdict(list)
    for sample in samples:
        by_length[len(sample)].append(sample)
    return [
        torch.stack(group[begin : begin + batch_size])
        for _, group in sorted(by_length.items(), reverse=True)
        for begin in range(0, len(group), batch_size)
    ]


def digest_of(samples: Iterable[Sequence[int]]) -> str:
    """sha256 over the token ids of all samples and where each one ends."""
    return hashlib.sha256(json.dumps([list(ids) for ids in samples]).encode()).hexdigest()


def _read_windows(files: list[Path], path: Path, encoder: Encoder, wanted: int, seed: int) -> list[list[int]]:
    """Windows spread over the text: one from each of `wanted` blocks. A text with too few blocks is read whole."""
    blocks = TextBlocks(files, block_bytes=_BYTES_PER_TOKEN * encoder.length)
    if len(blocks) > wanted:
        chosen = _choose(len(blocks), wanted, seed, lambda indices: {
            index: windows[0] for index in indices if (windows := encoder.windows([blocks.read(index)]))
        })  # fmt: skip
        if len(chosen) == wanted:
            return chosen
    texts = [read_text(file) for file in files]
    if not any(text.strip() for text in texts):
        raise DataError(f"calibration text {path} is empty: it holds nothing but white space")
    windows = [ids for ids in encoder.windows(texts) or [encoder.text("\n\n".join(texts))] if ids]
    if not windows:
        raise DataError(f"calibration text {path}: the tokenizer makes no token of it; give text that it knows")
    return _choose(len(windows), wanted, seed, lambda indices: {index: windows[index] for index in indices})


def _read_rows(files: list[Path], path: Path, encoder: Encoder, wanted: int, seed: int) -> list[list[int]]:
    tables = [open_rows(file, FIELDS) for file in files]
    starts = list(accumulate((len(table) for table in tables), initial=0))

    def take(indices: list[int]) -> dict[int, list[int]]:
        found = {}
        for table, file, start in zip(tables, files, starts, strict=False):
            own = [index - start for index in indices if start <= index < start + len(table)]
            for index, record in table.take(own):
                try:
                    found[start + index] = encoder.row(record)
                except (TemplateError, TypeError, ValueError) as error:
                    raise DataError(
                        f"calibration text {file}: messages of row {index + 1} do not fit the chat template: {error}"
                    ) from None
        return {index: ids for index, ids in found.items() if ids}

    chosen = _choose(starts[-1], wanted, seed, take)
    if not chosen:
        raise DataError(
            f"calibration text {path}: 0 usable of {starts[-1]} rows, expected a field named text "
            f"(or content, or messages) that is not empty"
        )
    return chosen


def _choose(count: int, wanted: int, seed: int, take: Callable[[list[int]], dict[int, list[int]]]) -> list[list[int]]:
    """Up to `wanted` of `count` pieces, in the order of the text. `take` gives those of some pieces that are usable.

    Pieces are taken in an order that only `seed` decides, at first as many as wanted, then ever more at a time.
    """
    order = list(range(count))
    random.Random(seed).shuffle(order)
    found: dict[int, list[int]] = {}
    seen = 0
    while seen < count and len(found) < wanted:
        some = order[seen : seen + max(seen, wanted)]
        seen += len(some)
        usable = take(sorted(some))
        missing = [index for index in some if index in usable][: wanted - len(found)]
        found |= {index: usable[index] for index in missing}
    return [found[index] for index in sorted(found)]


@dataclass(frozen=True)
class _Limits:
    """What the model's config.json allows; None where it does not say."""

    positions: int | None
    vocabulary: int | None

    @classmethod
    def of(cls, model: Path) -> "_Limits":
        try:
            config = read_json(model / "config.json")
            text = config.get("text_config") or {}
        except (OSError, ValueError, AttributeError) as error:
            raise SourceError(f"{model / 'config.json'} cannot be read: {error}") from None
        positions, vocabulary = (config.get(key, text.get(key)) for key in ("max_position_embeddings", "vocab_size"))
        return cls(positions, vocabulary)

    def check_length(self, length: int) -> None:
        if length < 1:
            raise DataError(f"sequence length {length} is too short; give at least 1 token")
        if self.positions is not None and length > self.positions:
            raise DataError(
                f"sequence length {length} is longer than the model's {self.positions} positions; "
                f"give at most {self.positions}"
            )

    def check_ids(self, samples: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
        largest = max((max(ids) for ids in samples), default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise DataError(
                f"the tokenizer gives {tokenizer.convert_ids_to_tokens(largest)!r} the id {largest}, but the model "
                f"has {self.vocabulary} embeddings; tokenizer and model do not belong together"
            )


def _warnings(samples: list[list[int]], wanted: int, path: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    warnings = []
    if len(samples) < wanted:
        warnings.append(f"{len(samples)} of {wanted} samples: {path} holds no more")
    middle = median(map(len, samples))
    if middle < _SHORT_TOKENS:
        warnings.append(f"median length {middle:g}: samples so short measure little")
    counts = Counter(token for ids in samples for token in ids)
    ordinary = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    total = sum(count for token, count in counts.items() if token not in ordinary)
    unknown = counts[tokenizer.unk_token_id] if tokenizer.unk_token_id is not None else 0
    if total and unknown * 2 > total:
        warnings.append(f"share of unknown tokens {unknown / total:.0%}: the tokenizer does not know this text")
    return warnings
