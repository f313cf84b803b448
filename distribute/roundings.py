"""Rows of the linear layers of a part, rounded by GPTQ or into ranges that are searched; and what that costs.

Rows do not touch each other. They are dealt out to ranks in contiguous runs of about equal work, cut where every
kernel gives the same bits whoever computes them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from distribute.linear import Linear
from distribute.numerics.awq import clip
from distribute.numerics.codec import Ranges
from distribute.numerics.gptq import Factor, prepare, solve
from distribute.numerics.moments import ROWS, diagonal_blocks, output_error
from distribute.numerics.observers import absmax
from distribute.numerics.search import group_ranges
from distribute.ranges import RANGING, weight_ranges
from distribute.ranks import Ranks
from distribute.reduce import united


@dataclass(frozen=True)
class Run:
    """Rows of one linear layer."""

    module: str
    rows: range


@dataclass(frozen=True)
class Cost:
    """Squared error of the outputs, relative to the outputs: of the source rounded to the nearest, and as solved."""

    nearest: float
    solved: float


def shares(linears: Mapping[str, Linear], world: int) -> list[list[Run]]:
    """Runs of rows by rank: contiguous, about equal in rows times columns. Pure."""
    total = sum(linear.weight.numel() for linear in linears.values()) or 1
    dealt: list[list[Run]] = [[] for _ in range(world)]
    before = 0
    for module, linear in linears.items():
        rows, columns = linear.weight.shape
        step = lcm(ROWS, linear.codec.rows_together)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            middle = 2 * before + (stop - start) * columns
            own = dealt[min(middle * world // (2 * total), world - 1)]
            before += (stop - start) * columns
            if own and own[-1].module == module:
                own[-1] = Run(module, range(own[-1].rows.start, stop))
            else:
                own.append(Run(module, range(start, stop)))
    return dealt


def solve_roundings(
    linears: Mapping[str, Linear], ranks: Ranks
) -> tuple[dict[str, Linear], dict[str, Cost], list[str]]:
    """The layers with what was found, each one's cost, and those that GPTQ could not solve. Called by all ranks.

    A layer that no token reached is returned as it is where tokens are needed. Costs are of layers with moments.
    """
    live = {m: one for m, one in linears.items() if one.has_second_moments or one.algorithm.name in RANGING}
    found: dict[str, Tensor] = {}
    for run, pieces in _solved(live, shares(live, ranks.world)[ranks.rank]):
        found |= {f"{run.module}.{name}.{run.rows.start}": piece for name, piece in pieces.items()}
    parameters: dict[str, dict[str, list[tuple[int, Tensor]]]] = {module: {} for module in live}
    for key, piece in united(found, ranks).items():
        module, name, start = key.rsplit(".", 2)
        parameters[module].setdefault(name, []).append((int(start), piece))
    result, costs = dict(linears), {}
    fallen = []
    for module, linear in live.items():
        whole = {n: torch.cat([piece for _, piece in sorted(p, key=_start)]) for n, p in parameters[module].items()}
        if linear.has_second_moments:
            nearest, size, solved, size_solved = whole.pop("errors").sum(dim=0).tolist()
            costs[module] = Cost(nearest / (size or 1.0), solved / (size_solved or 1.0))
        if bool(whole.pop("fallen").any()):
            fallen.append(module)
        result[module] = linear.with_parameters({n: v.to(linear.weight.device) for n, v in whole.items()})
    return result, costs, fallen


def _start(item: tuple[int, Tensor]) -> int:
    return item[0]


def _solved(linears: Mapping[str, Linear], runs: list[Run]) -> Iterator[tuple[Run, dict[str, Tensor]]]:
    """What was found for each run, its errors [1, 4] fp64 (see `_errors`) where known, and `fallen` [1] bool."""
    factors: dict[int, Factor] = {}
    for run in runs:
        linear = linears[run.module]
        moments = linear.input_moments()
        rows = slice(run.rows.start, run.rows.stop)
        pieces, fallen = _round(linear, rows, moments, factors)
        if moments is not None:
            pieces["errors"] = _errors(linear, rows, moments, pieces)[None]
        pieces["fallen"] = torch.tensor([fallen])
        yield run, pieces


def _errors(linear: Linear, rows: slice, moments: Tensor, pieces: Mapping[str, Tensor]) -> Tensor:
    """fp64 [4]: error of the outputs and their size, of the source rounded to the nearest; the same as solved."""
    assert linear.moments is not None and linear.moments.second is not None
    source, weight = linear.weight[rows].to(torch.float32), linear.smoothed[rows].to(torch.float32)
    nearest = linear.fake(linear.weight[rows], absmax(linear.weight))
    return torch.stack(
        [
            output_error(nearest - source, linear.moments.second),
            output_error(source, linear.moments.second),
            output_error(linear.coded(rows, pieces) - weight, moments),
            output_error(weight, moments),
        ]
    )


def _round(
    linear: Linear, rows: slice, moments: Tensor | None, factors: dict[int, Factor]
) -> tuple[dict[str, Tensor], bool]:
    """Parameters of these rows; whether GPTQ had to give up."""
    algorithm, weight = linear.algorithm, linear.smoothed[rows]
    if moments is None or algorithm.name in RANGING:
        chosen = weight_ranges(linear, rows)
        return ({} if chosen is None else _ends(chosen)), False
    if algorithm.name == "gptq":
        key = id(linear.moments)
        if key not in factors:
            factors.clear()  # one at a time: they are as large as the moments
            factors[key] = prepare(moments, damping=algorithm.damping, by_activity=algorithm.static_order)
        factor = factors[key]
        if factor.damping is None:
            return {}, True
        ranges = group_ranges(weight, linear.group) if algorithm.static_order else None
        solution = solve(weight, factor, linear.grid, group=linear.group, ranges=ranges)
        return {"codes": solution.codes, **_ends(solution.ranges)}, False
    if algorithm.name == "awq" and algorithm.clip and linear.has_free_ranges:
        blocks = diagonal_blocks(moments, linear.group)
        ranges, _ = clip(weight, blocks, lambda w, r: linear.fake(w, linear.absmax, r), group=linear.group)
        return _ends(ranges), False
    return {}, False


def _ends(ranges: Ranges) -> dict[str, Tensor]:
    return {"low": ranges.low, "high": ranges.high}
