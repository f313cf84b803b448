"""Calibration statistics: absmax of the inputs of linear layers that are to be quantized, and of keys and values.

Owns what is measured and how parts measured apart become one. `merge` is associative and exact, so that the
result does not depend on how batches were dealt out. An expert that no token reached has no absmax but a count.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distribute.errors import StageError
from distribute.inputs import InputStatistics, watching
from distribute.job import Progress
from distribute.kv import KeyValueStatistics, attentions, watching_kv
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
    channel_absmax: dict[str, Tensor] = field(default_factory=dict)  # fp32 [in], CPU; when asked for
    kv_absmax: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by attention module; when asked for


def observe(
    model: LayerwiseModel,
    batches: Sequence[Tensor],
    quantized: Collection[str],
    progress: Progress | None = None,
    *,
    channels: bool = False,
    kv: bool = False,
) -> Observation:
    """Run `batches` (token ids [n, len] int64 without padding) and measure the inputs of `quantized`.

    Args:
        channels: measure every channel of these inputs too.
        kv: measure keys after rotation, and values, of every attention of the decoder.

    Raises:
        SourceError: a module in `quantized` is not a linear layer of the decoder.
        StageError: what is measured holds NaN or Inf, or could not be seen; the module is named.
    """
    wanted = set(quantized)
    model.check(wanted)
    found = Observation(tokens=sum(batch.numel() for batch in batches))
    rows: dict[str, int] = {}

    @contextmanager
    def around(part: nn.Module, projections: list[Projection]) -> Iterator[None]:
        watched = [projection for projection in projections if projection.module in wanted]
        statistics, keys_values = InputStatistics(channels=channels), KeyValueStatistics()
        with (
            watching(part, watched, statistics),
            watching_kv(part, projections, keys_values) if kv else nullcontext(),
        ):
            yield
        absmax, per_channel = statistics.finish()
        cached = keys_values.finish()
        _refuse_not_finite(absmax, cached)
        if kv and found.tokens:
            _refuse_unseen_cache(set(attentions(projections).values()) - set(cached))
        found.input_absmax.update(absmax)
        found.channel_absmax.update(per_channel)
        found.kv_absmax.update(cached)
        rows.update(statistics.rows)

    model.run(batches, around=around, progress=progress)
    counts = _tokens_per_expert(wanted, rows)
    if found.tokens:
        _refuse_unseen(wanted, found.input_absmax, counts)
    return replace(found, tokens_per_expert=counts)


def merge(first: Observation, second: Observation) -> Observation:
    """One observation of the tokens of both."""
    counts = {block: list(tokens) for block, tokens in first.tokens_per_expert.items()}
    for block, tokens in second.tokens_per_expert.items():
        known = counts.get(block, [0] * len(tokens))
        counts[block] = [a + b for a, b in zip(known, tokens, strict=True)]
    cached = dict(first.kv_absmax)
    for name, (keys, values) in second.kv_absmax.items():
        known_keys, known_values = cached.get(name, (keys, values))
        cached[name] = torch.maximum(known_keys, keys), torch.maximum(known_values, values)
    return Observation(
        _larger(first.input_absmax, second.input_absmax),
        counts,
        first.tokens + second.tokens,
        _larger(first.channel_absmax, second.channel_absmax),
        cached,
    )


def merge_ranks(
    observation: Observation, quantized: Collection[str], *, ranks: Ranks, workspace_path: Path | None
) -> Observation | None:
    """All ranks call this with the same `quantized`. The merged observation on the first rank, None elsewhere.

    Only vectors of absmax values and counts travel.
    """
    names = sorted(quantized, key=natural_key)
    zero = torch.zeros(())
    values = torch.tensor([float(observation.input_absmax.get(name, zero)) for name in names])
    seen = torch.tensor([float(name in observation.input_absmax) for name in names])
    values, seen = ranks.absmax(torch.stack([values, seen])).unbind()
    record: dict[str, Any] = {
        "tokens": observation.tokens,
        "tokens_per_expert": observation.tokens_per_expert,
        "channel_absmax": observation.channel_absmax,
        "kv_absmax": {name: torch.stack(pair) for name, pair in observation.kv_absmax.items()},
    }
    records = ranks.gather(record, workspace_path)
    if not ranks.is_first:
        return None
    merged = Observation()
    for other in records:
        channels, cached = other["channel_absmax"], {n: (v[0], v[1]) for n, v in other["kv_absmax"].items()}
        merged = merge(merged, Observation({}, other["tokens_per_expert"], other["tokens"], channels, cached))
    absmax = {name: value for name, value, found in zip(names, values, seen, strict=True) if found}
    return replace(merged, input_absmax=absmax)


def _larger(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    return first | {n: torch.maximum(first[n], value) if n in first else value for n, value in second.items()}


def _tokens_per_expert(wanted: set[str], rows: dict[str, int]) -> dict[str, list[int]]:
    counts: dict[str, list[int]] = {}
    for module in sorted(wanted, key=natural_key):
        if expert := expert_of(module):
            tokens = counts.setdefault(expert.block, [])
            tokens.extend([0] * (expert.index + 1 - len(tokens)))
            tokens[expert.index] = max(tokens[expert.index], rows.get(module, 0))
    return counts


def _refuse_not_finite(absmax: dict[str, Tensor], cached: dict[str, tuple[Tensor, Tensor]]) -> None:
    named = [(f"the input of {name}", value) for name, value in absmax.items()]
    named += [(f"the keys of {name}", keys) for name, (keys, _) in cached.items()]
    named += [(f"the values of {name}", values) for name, (_, values) in cached.items()]
    for what, value in named:
        if not torch.isfinite(value):
            raise StageError(
                f"{what} holds {value.item()} during calibration; the source model computes "
                "no finite numbers there: check its weights and its dtype in config.json"
            )


def _refuse_unseen_cache(unseen: set[str]) -> None:
    if unseen:
        raise StageError(
            f"keys and values of {', '.join(sorted(unseen, key=natural_key)[:5])} could not be observed: this "
            "model's attention does not go through transformers' interface; leave kv_cache out of the recipe"
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
