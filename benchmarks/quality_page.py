"""docs/quality.md, from what was found: which peers a recipe is compared with, and whether it does as well."""

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.makers import GROUP_SIZE, OURS, VERSIONS, Case
from distribute.dialects.table import DIALECTS
from distribute.scheme import Scheme

#: A recipe may be worse than the best peer by this share of its perplexity.
MARGIN = 0.005
#: Searched recipe -> the one of the same format that only rounds.
ROUNDED = {"int4_awq": "int4", "int4_gptq": "int4", "nvfp4_awq": "nvfp4"}

TEXT = """# Quality

What each recipe loses. SmolLM2-135M-Instruct, a small model on which losses are large, was quantized by this project
in both dialects, and by {modelopt} and {llmcompressor} with the same scheme; then each
checkpoint predicted {tokens} tokens of held-out text (State of the Union addresses, windows of 512). The bf16 source
has perplexity **{source:.3f}**. Made on {date} by `python -m benchmarks.quality`.

- All makers had the same {samples} calibration samples of 512 tokens, as token ids, and their own default settings;
  groups of int4 are of {group_size}, because the model's hidden size is no multiple of 128.
- One judge measured all: the source model in transformers with the checkpoint's decoded weights, in bf16, and with
  the inputs of quantized layers coded as the scheme says ([judge.py](../benchmarks/judge.py)); no engine's kernels.
- **beside it**: perplexity relative to that of the peer that writes this dialect. **beside the best**: to that of the
  best peer with the same scheme, whichever dialect it writes. Target: not above +{margin:.1%}. Met in its dialect:
  each dialect has its own rule for scales, and only the peer with the other rule does better.
- llm-compressor's AWQ stops on a machine without an accelerator, where it cannot pin memory: that step was left out.
- "-": not measured yet. Codes of inputs turn on the last bits of what is computed: on 2,000 tokens the judge in fp32
  instead of bf16 moved the perplexity of fp8 by 0.4 %, so small differences say nothing.

{table}

## Searched against rounded

AWQ and GPTQ have to do better than the same format rounded to nearest.

{searched}
{failures}"""


@dataclass(frozen=True)
class Judged:
    """What is kept of a checkpoint; `perplexity` 0: not taken."""

    perplexity: float = 0.0
    judged_on: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    peak_bytes: int = 0
    error: str = ""


class Page:
    """The page of everything found."""

    def __init__(self, found: Mapping[Case, Judged], source: float, *, samples: int, tokens: int):
        self.found, self.source, self.samples, self.tokens = found, source, samples, tokens

    def make_text(self, date: datetime.date) -> str:
        """The whole page."""
        return TEXT.format(
            **VERSIONS, source=self.source, samples=self.samples, tokens=f"{self.tokens:,}", date=date,
            group_size=GROUP_SIZE, margin=MARGIN, table="\n".join(self._table()),
            searched="\n".join(self._searched()), failures="".join(self._failures()),
        )  # fmt: skip

    def beside(self, case: Case, dialects: Iterable[str] = DIALECTS) -> float | None:
        """Perplexity over that of the best peer with the same scheme in these dialects, less 1; None: no peer."""
        peers = [
            judged.perplexity
            for other, judged in self.found.items()
            if other.maker != OURS
            and other.dialect in dialects
            and other.preset == case.preset
            and _stored(other.scheme) == _stored(case.scheme)
            and judged.perplexity
        ]
        own = self.found[case].perplexity
        return own / min(peers) - 1 if peers and own else None

    def _table(self) -> Iterator[str]:
        yield "| recipe | dialect | nogather | over bf16 | peer | its own | beside it | beside the best | target |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for case in self.found:
            if case.maker == OURS:
                yield self._row(case)

    def _row(self, case: Case) -> str:
        own = self.found[case]
        rise = f"{own.perplexity / self.source - 1:+.2%}" if own.perplexity else "-"
        ratios = (self.beside(case, [case.dialect]), self.beside(case))
        alike = [c for c in self.found if (c.preset, c.dialect) == (case.preset, case.dialect)]
        peer = next(other for other in alike if other.maker != OURS)
        beside = ("-" if ratio is None else f"{ratio:+.2%}" for ratio in ratios)
        numbers = (_number(own), rise, peer.maker, _number(self.found[peer]))
        return f"| {' | '.join((case.preset, case.dialect, *numbers, *beside, _verdict(*ratios)))} |"

    def _searched(self) -> Iterator[str]:
        yield "| recipe | dialect | maker | perplexity | rounded | change | |"
        yield "|---|---|---|---|---|---|---|"
        for case, judged in self.found.items():
            rounded = self.found.get(Case(case.maker, ROUNDED.get(case.preset, ""), case.dialect))
            if rounded and rounded.perplexity and judged.perplexity:
                change = judged.perplexity / rounded.perplexity - 1
                cells = (
                    case.preset, case.dialect, case.maker, _number(judged), _number(rounded), f"{change:+.2%}",
                    "better" if change < 0 else "**not better**",
                )  # fmt: skip
                yield f"| {' | '.join(cells)} |"

    def _failures(self) -> Iterator[str]:
        failed = {case: judged.error for case, judged in self.found.items() if judged.error}
        if failed:
            yield "\n## What could not be made\n\n"
        for case, error in failed.items():
            yield f"- {case.preset}, {case.dialect}, by {case.maker}: `{' '.join(error.split())[:300]}`\n"


def _stored(scheme: Scheme) -> tuple[str, str]:
    """What is equal for two schemes that an engine computes alike."""
    return (repr(scheme.weights), repr(scheme.inputs))


def _verdict(beside_peer: float | None, beside_best: float | None) -> str:
    if beside_best is None:
        return "-"
    if beside_best <= MARGIN:
        return "met"
    return "met in its dialect" if beside_peer is not None and beside_peer <= MARGIN else "**missed**"


def _number(judged: Judged) -> str:
    if judged.error:
        return "failed"
    return f"{judged.perplexity:.3f}" if judged.perplexity else "-"
