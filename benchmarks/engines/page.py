"""docs/engines.md: the records as a table for each dialect, and every refusal with its exact message."""

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.engines.cases import GROUP_SIZE, SOURCES, Case
from benchmarks.engines.measure import Record
from benchmarks.engines.reasons import explain
from benchmarks.engines.table import Engine

COMMAND = "make engines"
NOT_TRIED = "-"
INTRODUCTION = """# Engines

Which inference engine runs which checkpoint. `{command}` made this page on {date}: nogather quantized
SmolLM2-135M-Instruct with every preset, in both dialects, and each engine loaded the result, continued
"{prompt}" and was measured on held-out text.

- **+1.2 %**: it runs; that much the perplexity rose over the bf16 source in the same engine ({tokens} tokens, one
  window of 512 at a time). **✓**: it runs and goes on as the source does, but gives no likelihoods. Where the answer
  does not begin as the source's does, it is shown.
- **(+1.2 %)**: the CPU build of vLLM has no kernel, so its missing operations were replaced by plain arithmetic
  ([emulate.py](../benchmarks/engines/readers/emulate.py)): vLLM's config, loader and fusing are tried, its GPU
  kernels are not. (Its own arithmetic for MXFP8 leaves the inputs as they are.)
- **reads**: the newest release's own parser took the config, and as what; no weight was loaded, since its kernels are
  for GPUs.
- **[n]**: refused; the message is below. "{none}": not tried, because there was no such checkpoint.

Tried: {engines}. Each had one thread of a CPU.

mistral.rs wants `rope_theta` at the top of `config.json`, where transformers 5 writes it under `rope_parameters`:
it was given a copy of the config with both. The presets of int4 had `group_size: {group_size}`, because the model's
hidden size, 576, is no multiple of 128; "padded" is the same model with zeros added up to such multiples. Model and
calibration are small: the rises compare engines, not presets.
"""


@dataclass
class Page:
    """What the page is made from.

    Attributes:
        records: by case, dialect and engine.
        refused: case and dialect -> the message with which this project refuses that recipe.
        messages: of each engine, filled while cells are written.
    """

    cases: Sequence[Case]
    engines: Sequence[Engine]
    records: dict[tuple[str, str, str], Record]
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    messages: dict[tuple[str, str], str] = field(default_factory=dict)

    def make_text(self, *, prompt: str, date: datetime.date) -> str:
        """The whole page."""
        tokens = max((record.tokens for record in self.records.values()), default=0)
        named = [f"{engine.title} {engine.version}" for engine in self.engines if not engine.after]
        parts = [
            INTRODUCTION.format(
                command=COMMAND, date=date.isoformat(), prompt=prompt, none=NOT_TRIED, tokens=tokens,
                engines="; ".join(named), group_size=GROUP_SIZE,
            ),
            "## The bf16 sources: perplexity\n\n" + self._table(SOURCES),
        ]  # fmt: skip
        for dialect in dict.fromkeys(case.dialect for case in self.cases if case.dialect):
            parts.append(f"## {dialect}\n\n" + self._table(case for case in self.cases if case.dialect == dialect))
        refusals = (
            f"{number}. {engine}: `{message.replace('`', chr(39))}`<br>{explain(message)}"
            for number, ((engine, _), message) in enumerate(self.messages.items(), 1)
        )
        return "\n".join([*parts, "## Refusals\n", *refusals]) + "\n"

    def _table(self, cases: Iterable[Case]) -> str:
        columns = [engine for engine in self.engines if not engine.after]
        lines = [f"| | {' | '.join(engine.title for engine in columns)} |", "|---" * (len(columns) + 1) + "|"]
        for case in cases:
            if message := self.refused.get((case.name, case.dialect)):
                cells = [self._number("nogather", message)] + [NOT_TRIED] * (len(columns) - 1)
            else:
                cells = [self._cell(case, engine) for engine in columns]
            lines.append(f"| {case.name} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def _cell(self, case: Case, engine: Engine) -> str:
        """What one engine did with one checkpoint, and what it did with help."""
        record = self.records.get((case.name, case.dialect, engine.key))
        if record is None:
            return NOT_TRIED
        source = self.records.get((case.source.name, case.source.dialect, engine.key))
        words = [self._outcome(record, source, engine)]
        for helped in self.engines:
            again = self.records.get((case.name, case.dialect, helped.key))
            if helped.after == engine.key and again is not None and record.error not in ("", again.error):
                words.append(f"({self._outcome(again, source, helped)})")
        return " ".join(words)

    def _outcome(self, record: Record, source: Record | None, engine: Engine) -> str:
        if record.parsed:
            return f"reads: {record.parsed.removeprefix('CompressedTensors')}"
        if record.error and record.answer is None:
            return self._number(engine.title, record.error)
        words = []
        if record.perplexity is None:
            words.append("✓")
        elif source is None or source.perplexity is None or source is record:
            words.append(f"{record.perplexity:.2f}")
        else:
            words.append(f"{100 * (record.perplexity / source.perplexity - 1):+.1f} %")
        if source is not None and not _begins_alike(record.answer or "", source.answer or ""):
            words.append(f'"{_one_line(record.answer or "")}"')
        if record.error:
            words.append(self._number(engine.title, record.error))
        return " ".join(words)

    def _number(self, engine: str, message: str) -> str:
        """One number for messages that differ in places of a file alone."""
        key = (engine, re.sub(r"at line \d+ column \d+", "", _one_line(message)))
        self.messages.setdefault(key, _one_line(message))
        return f"[{list(self.messages).index(key) + 1}]"


def _begins_alike(answer: str, expected: str) -> bool:
    """The same first word: later ones may differ, and do between any two roundings."""
    return re.findall(r"\w+", answer)[:1] == re.findall(r"\w+", expected)[:1]


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")
