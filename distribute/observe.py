"""Calibration statistics: the absmax of the input of every linear layer that is to be quantized.

Owns what is measured and how parts measured apart become one. `merge` is associative and exact, so that the
result does not depend on how batches were dealt out. An expert that no token reached has no absmax but a count.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distribute.errors import StageError
from distribute.inputs import InputStatistics, watching
from distribute.job import Progress
from distribute.layers import expert_of, natural_key
from distribute.layerwise import LayerwiseModel
from distribute.modules import Projection
from distribute.ranks import Ranks


@dataclass(frozen=True)
class Observation:
    """What some tokens showed. Module names are those on disk."""

    input_absmax: dict[str, Tensor] = field(default_factory=dict)  # fp32 0-dim, CPU
    tokens_per_expert: dict[str, list[int]] = field(default_factory=dict)  # experts block -> tokens by index
    tokens: int = 0


def observe(
    model: LayerwiseModel,
    batches: Sequence[Tensor],
    quantized: Collection[str],
    progress: Progress | None = None,
) -> Observation:
    """Run `batches` (token ids [n, len] int64 without padding) and measure the inputs of `quantized`.

    Raises:
        SourceError: a module in `quantized` is not a linear layer of the decoder.
        StageError: an input holds NaN or Inf, or a layer's inputs could not be seen; the module is named.
    """
    wanted = set(quantized)
    model.check(wanted)
    absmax: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    @contextmanager
    def around(part: nn.Module, projections: list[Projection]) -> Iterator[None]:
        watched = [projection for projection in projections if projection.module in wanted]
        statistics = InputStatistics()
        with watching(part, watched, statistics):
            yield
        values = statistics.finish()
        _refuse_not_finite(values)
        absmax.update(values)
        rows.update(statistics.rows)

    model.run(batches, around=around, progress=progress)
    tokens = sum(batch.numel() for batch in batches)
    counts = _tokens_per_expert(wanted, rows)
    if tokens:
        _refuse_unseen(wanted, absmax, counts)
    return Observation(absmax, counts, tokens)


def merge(first: Observation, second: Observation) -> Observation:
    """One observation of the tokens of both."""
    absmax = dict(first.input_absmax)
    for name, value in second.input_absmax.items():
        absmax[name] = torch.maximum(absmax[name], value) if name in absmax else value
    counts = {block: list(tokens) for block, tokens in first.tokens_per_expert.items()}
    for block, tokens in second.tokens_per_expert.items():
        known = counts.get(block, [0] * len(tokens))
        counts[block] = [a + b for a, b in zip(known, tokens, strict=True)]
    return Observation(absmax, counts, first.tokens + second.tokens)


def merge_ranks(
    observation: Observation, quantized: Collection[str], *, ranks: Ranks, workspace_path: Path | None
) -> Observation | None:
    """All ranks call this with the same `quantized`. The merged observation on the first rank, None elsewhere.

    Only a vector of absmax values and one JSON record a rank travel.
    """
    names = sorted(quantized, key=natural_key)
    zero = torch.zeros(())
    values = torch.stack([observation.input_absmax.get(name, zero) for name in names])
    seen = torch.tensor([float(name in observation.input_absmax) for name in names])
    values, seen = ranks.absmax(torch.stack([values, seen])).unbind()
    record: dict[str, Any] = {
        "tokens": observation.tokens,
        "tokens_per_expert": observation.tokens_per_expert,
    }
    records = ranks.gather(record, workspace_path)
    if not ranks.is_first:
        return None
    merged = Observation()
    for other in records:
        merged = merge(merged, Observation({}, other["tokens_per_expert"], other["tokens"]))
    absmax = {name: value for name, value, found in zip(names, values, seen, strict=True) if found}
    return Observation(absmax, merged.tokens_per_expert, merged.tokens)


def _tokens_per_expert(wanted: set[str], rows: dict[str, int]) -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for module in sorted(wanted, key=natural_key):
        if expert := expert_of(module):
            tokens = counts.setdefault(expert.block, [])
            tokens.extend([0] * (expert.index + 1 - len(tokens)))
            tokens[expert.index] = max(tokens[expert.index], rows.get(module, 0))
    return counts


def _refuse_not_finite(values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        if not torch.isfinite(value):
            raise StageError(
                f"the input of {name} holds {value.item()} during calibration; the source model computes "
                "no finite numbers there: check its weights and its dtype in config.json"
            )


def _refuse_unseen(wanted: set[str], absmax: dict[str, Tensor], counts: dict[str, list[int]]) -> None:
    """Experts may go without tokens, but not all of a block; every other layer sees every token."""
    unseen = [name for name in sorted(wanted - set(absmax), key=natural_key) if expert_of(name) is None]
    unseen += [block for block, tokens in counts.items() if not any(tokens)]
    if unseen:
        raise StageError(
            f"no input of {', '.join(unseen[:5])} could be observed although tokens were run; "
            "add it to the recipe's ignore list"
        )
