"""GPTQ (Frantar et al. 2023, arXiv:2210.17323): columns are coded in turn, and each error is made up for by the rest.

A layer's second moments H are factored once (`prepare`); then any slice of its rows is solved (`solve`), because rows
do not touch each other. With H damped and U its inverse's upper Cholesky factor, U^T U = H^-1, column j coded with
error e = (w_j - q_j) / U_jj changes every later column k by -e U_jk.

Differences from the paper's code: a feature that never moved (H_jj = 0) keeps its weights, coded to the nearest,
instead of losing them, and does not count for the mean of the diagonal; a group of scales that begins within a block
of columns sees the errors of the block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.numerics.codec import Grid, Ranges
from distribute.numerics.moments import check_moments, in_row_blocks
from distribute.numerics.search import group_ranges

#: Columns whose errors are passed on together.
BLOCK = 128
#: Damping is multiplied by this where a factorisation fails, and given up on above the last.
DAMPING_STEP, DAMPING_MOST = 10.0, 1.0


@dataclass(frozen=True)
class Factor:
    """What the moments of a layer's inputs say about the order of its columns and how errors pass on.

    `upper` is fp32 [in, in], upper triangular, in the order of `order` (int64 [in]: the column taken at each step)
    and of moments divided by `unit`. `damping` is the fraction of the mean diagonal that was needed; None when no
    factor was found, so that every weight is coded to the nearest.
    """

    upper: Tensor
    order: Tensor
    unit: float
    damping: float | None

    @property
    def is_ordered(self) -> bool:
        """Whether the columns are taken from left to right."""
        return torch.equal(self.order, torch.arange(len(self.order), device=self.order.device))


@dataclass(frozen=True)
class Solution:
    """Codes int8 [n, in] in the weight's own order of columns, the ranges of their grid, and the error of each row.

    `error` is fp32 [n]: d H d^T of a row's change d under the damped moments.
    """

    codes: Tensor
    ranges: Ranges
    error: Tensor


def prepare(
    moments: Tensor, *, damping: float = 0.01, by_activity: bool = False, dtype: torch.dtype = torch.float32
) -> Factor:
    """Factor the moments [in, in] of a layer's inputs.

    Args:
        damping: the fraction of the mean diagonal that is added to the diagonal.
        by_activity: take the columns of the most active features first; ranges must then be known beforehand.
        dtype: in which the factor is computed.

    Raises:
        ValueError: the moments are not finite, or not square; the damping is not within 0 and 1.
    """
    if not 0 <= damping <= DAMPING_MOST:
        raise ValueError(f"damping of GPTQ is a fraction between 0 and {DAMPING_MOST:g}, not {damping}")
    width = moments.shape[-1]
    check_moments(moments, width)
    diagonal = moments.diagonal()
    # stable: equal features keep their order on every device
    order = torch.argsort(diagonal, descending=True, stable=True) if by_activity else torch.arange(width)
    order = order.to(moments.device)
    unit = float(diagonal.double().sum()) / max(1, int((diagonal > 0).sum()))
    if unit == 0:
        return Factor(torch.eye(width, device=moments.device), order, 1.0, damping)
    scaled = moments[order][:, order].to(dtype) / unit
    while damping <= DAMPING_MOST:
        upper = _inverse_factor(scaled, damping)
        if upper is not None:
            return Factor(upper.to(torch.float32), order, unit, damping)
        damping = max(damping, 1e-4) * DAMPING_STEP
    return Factor(torch.eye(width, device=moments.device), order, unit, None)


def _inverse_factor(scaled: Tensor, damping: float) -> Tensor | None:
    """U with U^T U = (H + damping)^-1, None where H is not positive definite even so.

    Backwards, H = R R^T with R upper triangular; then U = R^-1: one factorisation and one inversion of a triangle.
    """
    damped = scaled.flip(0, 1)
    damped.diagonal().add_(damping)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        return None
    identity = torch.eye(len(damped), dtype=damped.dtype, device=damped.device)
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return upper if bool(torch.isfinite(upper).all()) else None


def solve(
    rows: Tensor, factor: Factor, grid_of: Callable[[Ranges], Grid], *, group: int, ranges: Ranges | None = None
) -> Solution:
    """Code finite float rows [n, in] so that the outputs change least.

    Slices of rows that start at a multiple of `moments.ROWS` give the codes and ranges of the whole, bit by bit.

    Args:
        grid_of: the grid of a format under ranges fp32 [n, groups]; scales as they are stored.
        group: columns that share a scale; the width where a row does.
        ranges: of the groups; None: measured when a group begins, on weights that made up for the errors so far.

    Raises:
        ValueError: a weight is not finite, the rows are not whole groups or not as wide as the factor, or there are
            no ranges though the columns are not taken from left to right.
    """
    n, width = rows.shape
    if width != len(factor.order):
        raise ValueError(f"rows of {width} input features do not fit second moments of {len(factor.order)}")
    whole = group_ranges(rows, group)
    if not bool(whole.absmax.isfinite().all()):
        raise ValueError("GPTQ needs finite weights")
    if ranges is None and not factor.is_ordered:
        raise ValueError("ranges must be given where columns are taken by activity")
    work = _Work(
        left=rows.to(torch.float32)[:, factor.order].T.contiguous(),
        codes=torch.empty(width, n, dtype=torch.int8, device=rows.device),
        ranges=whole if ranges is None else ranges,
        error=torch.zeros(n, device=rows.device),
    )
    grids = _measured(work, group, grid_of) if ranges is None else _known(grid_of(ranges), factor.order // group)
    for columns in _blocks(width, group):
        errors = _solve_block(work, factor.upper, columns, grids)
        later = factor.upper[columns.start : columns.stop, columns.stop :]
        if later.shape[1]:
            work.left[columns.stop :] -= in_row_blocks(torch.mm, errors.T, later).T
    codes = torch.empty_like(work.codes)
    codes[factor.order] = work.codes
    return Solution(codes.T.contiguous(), work.ranges, work.error * factor.unit)


@dataclass(frozen=True)
class _Work:
    """What `solve` changes in place. Everything by column lies [in, n], so that a column is contiguous."""

    left: Tensor  # fp32: the weights not coded yet, which make up for the errors so far
    codes: Tensor
    ranges: Ranges
    error: Tensor


def _blocks(width: int, group: int) -> Iterator[range]:
    """Columns whose errors are passed on together: at most `BLOCK`, or whole groups; a group never begins within
    a block that holds but a part of the group before."""
    whole = group * max(1, BLOCK // group)
    for start in range(0, width, whole):
        stop = min(start + whole, width)
        yield from (range(first, min(first + BLOCK, stop)) for first in range(start, stop, BLOCK))


def _known(grid: Grid, groups: Tensor) -> Iterator[tuple[Grid, int]]:
    """For each column in turn its grid, and its group there."""
    return ((grid, group) for group in groups.tolist())


def _measured(work: _Work, group: int, grid_of: Callable[[Ranges], Grid]) -> Iterator[tuple[Grid, int]]:
    """As `_known`, with the ranges of each group measured, and noted in `work`, when its first column comes."""
    for index, start in enumerate(range(0, len(work.left), group)):
        own = group_ranges(work.left[start : start + group].T, group)
        work.ranges.low[:, index], work.ranges.high[:, index] = own.low[:, 0], own.high[:, 0]
        grid = grid_of(own)
        yield from ((grid, 0) for _ in range(group))


def _solve_block(work: _Work, upper: Tensor, columns: range, grids: Iterator[tuple[Grid, int]]) -> Tensor:
    """In place: code the columns and pass errors on within them; the errors fp32 [columns, n] for the later ones.

    Every step here works element by element, so that a row does not depend on its neighbours.
    """
    errors = torch.empty(len(columns), work.left.shape[1], device=work.left.device)
    for error, column in zip(errors, columns, strict=True):
        grid, group = next(grids)
        weights = work.left[column]
        codes = grid.codes(weights[:, None], group)
        work.codes[column] = codes[:, 0]
        torch.sub(weights, grid.values(codes, group)[:, 0], out=error).div_(upper[column, column])
        work.error.add_(error.square())
        # two steps: a fused one rounds differently in the odd elements at the end
        work.left[column + 1 : columns.stop].sub_(upper[column, column + 1 : columns.stop, None] * error)
    return errors
