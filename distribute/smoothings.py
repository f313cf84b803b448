"""Smoothing of the linear layers of a part: vectors by SmoothQuant or AWQ, and who takes up what.

Layers that share an input get one vector, searched together: the one whose coded weights change the outputs least,
by the moments of each layer's own inputs. Folds are shared among ranks whole; a search depends on its fold alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.encode import FOLD
from distribute.folds import Fold
from distribute.linear import Linear
from distribute.moments import Moments
from distribute.numerics.awq import search_scale
from distribute.numerics.smoothquant import Smoothing, column_absmax, search_alpha, smoothing
from distribute.ranks import Ranks
from distribute.reduce import united

#: Largest code of inputs by format: a step of theirs is absmax / code.
INPUT_CODES = {"int8": 127.0}


@dataclass(frozen=True)
class Candidate:
    """One way to smooth. `alpha` None: not at all."""

    alpha: float | None
    smoothing: Smoothing


def solve_smoothings(folds: Sequence[Fold], linears: Mapping[str, Linear], ranks: Ranks) -> dict[int, Candidate]:
    """The best smoothing by index of the fold. Called by all ranks with equal arguments.

    A fold whose layers no token reached has none.
    """
    seen = {index: [linears[m] for m in fold.consumers if linears[m].moments] for index, fold in enumerate(folds)}
    live = [index for index, found in seen.items() if found]
    record: dict[str, Tensor] = {}
    for index in live[ranks.rank :: ranks.world]:
        chosen = _choose(seen[index])
        alpha = math.nan if chosen.alpha is None else chosen.alpha
        record |= {
            f"{index}.scale": chosen.smoothing.scale,
            f"{index}.alpha": torch.tensor(alpha, dtype=torch.float64),
        }
    every = united(record, ranks)
    found = {}
    for index in live:
        weight, alpha = seen[index][0].weight, float(every[f"{index}.alpha"])
        smoothing = Smoothing(every[f"{index}.scale"].to(weight.device), weight.dtype)
        found[index] = Candidate(None if math.isnan(alpha) else alpha, smoothing)
    return found


def spread_smoothings(
    folds: Sequence[Fold],
    chosen: Mapping[int, Candidate],
    linears: Mapping[str, Linear],
    *,
    absorb: Callable[[str, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Parameters of the layers of these folds, by "<module>.<name>", and new values of what takes a smoothing up.

    `absorb`: (a norm's tensor or a bias, by its name on disk; factor fp32) -> its new value.
    """
    parameters: dict[str, Tensor] = {}
    for index, fold in enumerate(folds):
        smoothing = chosen[index].smoothing if index in chosen else None
        for module in fold.consumers:
            found = _of_consumer(linears[module], smoothing, kept=fold.kind == "kept")
            parameters |= {f"{module}.{name}": value for name, value in found.items()}
        if smoothing is None or fold.kind == "kept":
            continue
        factor = smoothing.pre_quant_scale.to(torch.float32)
        if fold.kind == "linear":
            parameters[f"{fold.producer}.row_scale"] = factor
        parameters |= {f"{FOLD}{name}": absorb(name, factor) for name in fold.absorbing}
    return parameters


def _of_consumer(linear: Linear, smoothing: Smoothing | None, *, kept: bool) -> dict[str, Tensor]:
    weight, found = linear.weight, {}
    if smoothing is not None:
        found["smooth"] = smoothing.smooth
    if kept:
        ones = weight.new_ones(weight.shape[1])
        found["pre_quant_scale"] = ones if smoothing is None else smoothing.pre_quant_scale
    if linear.scheme.static_inputs and linear.moments is not None:
        channels = linear.moments.absmax
        found["input_absmax"] = channels.amax() if smoothing is None else smoothing.input_absmax(channels)
    return found


def _choose(linears: list[Linear]) -> Candidate:
    """The smoothing that errs least; one that is given is not measured."""
    first, seen = linears[0], _distinct(linears)
    weights, fakes = [linear.weight for linear in linears], [linear.fake for linear in linears]
    if first.algorithm.name == "awq":
        rows = sum(moments.rows for moments in seen)
        mean = torch.stack([moments.mean * (moments.rows / rows) for moments in seen]).sum(dim=0)
        scaled = search_scale(weights, mean, _seconds(linears), fakes, group=first.group)
        return Candidate(scaled.alpha, scaled.smoothing(first.weight.dtype))
    channels = torch.stack([moments.absmax for moments in seen]).amax(dim=0)
    alpha, inputs = first.algorithm.alpha, first.scheme.inputs
    if alpha != "search":
        return Candidate(float(alpha), smoothing(channels, list(map(column_absmax, weights)), float(alpha)))
    tokens = [linear.moments.rows for linear in linears if linear.moments is not None]
    codes = INPUT_CODES.get(inputs.format) if inputs is not None else None
    chosen = search_alpha(channels, weights, _seconds(linears), tokens, fakes, input_codes=codes)
    return Candidate(chosen.alpha, chosen.smoothing)


def _seconds(linears: Sequence[Linear]) -> list[Tensor]:
    """Second moments of the inputs of each."""
    found = [linear.moments.second for linear in linears if linear.moments is not None]
    return [second for second in found if second is not None]


def _distinct(linears: Sequence[Linear]) -> list[Moments]:
    """The moments of each input once."""
    return list({id(linear.moments): linear.moments for linear in linears if linear.moments is not None}.values())
