"""AWQ (Lin et al. 2023, arXiv:2306.00978): weights of active features are scaled up before they are coded.

The search of nvidia-modelopt 0.47 (quantization/model_calib.py, awq_lite and awq_clip): weight columns are multiplied
by s, inputs divided by it,

    s = a ** alpha / w ** (1 - alpha), within 1e-4 and 1e4, then divided by sqrt(largest * least)

with a the mean magnitude of an input feature and w the mean over rows of |weight| / absmax of its group. Differences:
the error is measured on every token, by second moments; `alpha=None`, no scaling, is a candidate too, so that the
result is never worse than the nearest codes; a feature that never moved has s = 1; linears that share an input search
one s together, where the reference averages theirs afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.numerics.codec import Ranges
from distribute.numerics.moments import Fake, in_row_blocks, output_error
from distribute.numerics.search import FakeInRanges, best_ranges, first_least, split_groups
from distribute.numerics.smoothquant import Smoothing, smoothed_weight

ALPHAS: tuple[float | None, ...] = (None, *(step / 10 for step in range(11)))
LEAST, MOST = 1e-4, 1e4
#: Clip ratios, from no clipping on.
RATIOS = tuple(1.0 - step / 20 for step in range(11))


@dataclass(frozen=True)
class Choice:
    """The chosen alpha (None: no scaling), its s (fp32 [in]), and the error of every alpha (fp64 [alphas])."""

    alpha: float | None
    scale: Tensor
    errors: Tensor

    def smoothing(self, dtype: torch.dtype) -> Smoothing:
        """How a model of this dtype applies it: inputs times 1 / s, weights times 1 / (1 / s), as the reference."""
        return Smoothing(1.0 / self.scale, dtype)


def relative_magnitudes(weight: Tensor, group: int) -> Tensor:
    """fp32 [in]: the mean over rows of |weight| / absmax of its group, rounded to the weight's dtype on the way.

    Args:
        weight: finite [out, in] in the model's dtype. For linears that share an input, all their rows together.
        group: columns that share a scale; the width where a row does.
    """
    magnitudes = split_groups(weight.abs(), group)
    relative = magnitudes / (magnitudes.amax(dim=2, keepdim=True) + torch.finfo(weight.dtype).tiny)
    return relative.flatten(1).mean(dim=0).to(torch.float32)


def weight_scale(input_mean: Tensor, weight_mean: Tensor, alpha: float | None) -> Tensor:
    """fp32 [in]: what weight columns are multiplied by.

    Args:
        input_mean: fp32 [in], the mean magnitude of each input feature.
        weight_mean: fp32 [in], `relative_magnitudes` of the weight.
        alpha: 0 to 1; None: no scaling.

    Raises:
        ValueError: a mean is not finite.
    """
    if not bool(input_mean.isfinite().all() & weight_mean.isfinite().all()):
        raise ValueError("AWQ needs finite weights and inputs")
    dead = input_mean == 0
    if alpha is None or bool(dead.all()):
        return torch.ones_like(weight_mean)
    scale = input_mean.pow(alpha) / (weight_mean.pow(1 - alpha) + torch.finfo(torch.float32).tiny)
    scale.clamp_(LEAST, MOST)
    moved = scale[~dead]
    return (scale / (moved.max() * moved.min()).sqrt()).masked_fill_(dead, 1.0)


def scale_error(weight: Tensor, scale: Tensor, moments: Tensor, fake: Fake) -> Tensor:
    """fp64 0-dim: the squared error of the outputs of rows [n, in] that are scaled, coded and scaled back.

    Errors of slices of rows, and of linears that share an input, add up.
    """
    coded = fake(smoothed_weight(weight, scale))
    return output_error(coded / scale - weight.to(torch.float32), moments)


def search_scale(
    weights: Sequence[Tensor],
    input_mean: Tensor,
    moments: Sequence[Tensor],
    fakes: Sequence[Fake],
    *,
    group: int,
    alphas: Sequence[float | None] = ALPHAS,
) -> Choice:
    """The scale that errs least for one linear, or for linears that share an input, together.

    Args:
        weights: finite [out, in] each, in the model's dtype.
        input_mean: fp32 [in], the mean magnitude of each input feature.
        moments: fp32 [in, in] of the inputs of each: the experts of a block share a scale, but not their tokens.
        fakes: of each weight; called on whole scaled weights.
        group: columns that share a scale.
    """
    mean = relative_magnitudes(torch.cat(list(weights)), group)
    scales = [weight_scale(input_mean, mean, alpha) for alpha in alphas]
    linears = list(zip(weights, moments, fakes, strict=True))
    errors = torch.stack(
        [torch.stack([scale_error(w, scale, m, fake) for w, m, fake in linears]).sum() for scale in scales]
    )
    best = first_least(errors)
    return Choice(alphas[best], scales[best], errors)


def clip(
    rows: Tensor, blocks: Tensor, fake: FakeInRanges, *, group: int, ratios: Sequence[float] = RATIOS
) -> tuple[Ranges, Tensor]:
    """Ranges of each group of rows, clipped to where the outputs of the group alone err least.

    Slices of rows that start at a multiple of `moments.ROWS` give the ranges of the whole, bit by bit.

    Args:
        rows: finite [n, in] in the model's dtype, scaled already.
        blocks: fp32 [groups, group, group], `moments.diagonal_blocks` of the scaled inputs.
        fake: codes and decodes rows under ranges.

    Returns:
        The ranges, and fp32 [n, groups]: the ratio chosen.
    """
    return best_ranges(rows, group, fake, lambda delta: in_row_blocks(_by_groups, delta, blocks), ratios)


def _by_groups(delta: Tensor, blocks: Tensor) -> Tensor:
    """[n, groups]: d H d^T of each group of a change [n, groups, group]."""
    return (torch.bmm(delta.transpose(0, 1), blocks).transpose(0, 1) * delta).sum(dim=2)
