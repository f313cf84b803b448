"""SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): hard-to-code inputs are divided, their weights multiplied.

The formulas and dtypes of nvidia-modelopt 0.47 (quantization/model_calib.py, smoothquant and
apply_pre_quant_scale_and_smooth): inputs are multiplied by

    w ** (1 - alpha) / a ** alpha      a, w: absmax of an input feature and of its weight column

and weight columns by its inverse. Linears that share an input take the mean of their scales (export/quant_utils.py).
A feature that never moved keeps its scale 1.0, where the reference may write 1e4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.numerics.moments import Fake, output_error
from distribute.numerics.search import first_least

LEAST, MOST = 1e-4, 1e4
#: An input feature whose absmax does not exceed it never moved.
NEVER_MOVED = 2.0**-31
ALPHAS = tuple(step / 10 for step in range(11))


@dataclass(frozen=True)
class Smoothing:
    """How the inputs and the weights of linears that share an input are scaled, feature by feature.

    `scale` is fp32 [in], `dtype` the model's. As in the reference, the inputs are multiplied by the scale rounded to
    that dtype, the weights by the inverse of the scale itself.
    """

    scale: Tensor
    dtype: torch.dtype

    @property
    def pre_quant_scale(self) -> Tensor:
        """[in] in the model's dtype: multiplies the inputs."""
        return self.scale.to(self.dtype)

    @property
    def smooth(self) -> Tensor:
        """fp32 [in]: multiplies the columns of the weights."""
        return 1.0 / self.scale

    def input_absmax(self, channels: Tensor) -> Tensor:
        """fp32 0-dim: the absmax of the smoothed inputs, from that of each feature (fp32 [in])."""
        return (channels.to(self.dtype) * self.scale).amax().to(self.dtype).to(torch.float32)


def smoothed_weight(rows: Tensor, smooth: Tensor) -> Tensor:
    """Rows [n, in] times `smooth` fp32 [in]: the product in fp32, rounded to the dtype of the rows."""
    return (rows * smooth.to(torch.float32)).to(rows.dtype)


def column_absmax(weight: Tensor) -> Tensor:
    """[in] of the dtype of the weight [out, in]: the absmax of each column. `torch.maximum` joins slices of rows."""
    return weight.abs().amax(dim=0) if weight.shape[0] else weight.new_zeros(weight.shape[1])


def input_scale(channels: Tensor, columns: Tensor, alpha: float) -> Tensor:
    """fp32 [in]: what the inputs of one linear are multiplied by.

    Args:
        channels: fp32 [in], absmax of each input feature.
        columns: [in] in the weight's dtype, in which its power is taken, as in the reference.

    Raises:
        ValueError: alpha is not within 0 and 1; an absmax is not finite.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha of SmoothQuant lies between 0 and 1, not {alpha}")
    if not bool(channels.isfinite().all() & columns.isfinite().all()):
        raise ValueError("SmoothQuant needs finite weights and inputs")
    scale = columns.pow(1 - alpha) / channels.to(torch.float32).pow(alpha)
    return scale.masked_fill_(channels <= NEVER_MOVED, 1.0).clamp_(LEAST, MOST)


def smoothing(channels: Tensor, columns: Sequence[Tensor], alpha: float = 1.0) -> Smoothing:
    """The smoothing of linears that share an input, from the column absmax of each: the mean of their own scales."""
    scales = [input_scale(channels, own, alpha) for own in columns]
    dtype = columns[0].dtype
    if all(torch.equal(scale, scales[0]) for scale in scales):
        return Smoothing(scales[0], dtype)
    mean = torch.stack([scale.to(dtype) for scale in scales]).mean(dim=0)  # in the dtype in which they are stored
    return Smoothing(mean.to(torch.float32), dtype)


@dataclass(frozen=True)
class Choice:
    """The alpha whose estimated error of the outputs is least, and the error of every alpha: fp64 [alphas]."""

    alpha: float
    smoothing: Smoothing
    errors: Tensor


def search_alpha(
    channels: Tensor,
    weights: Sequence[Tensor],
    moments: Sequence[Tensor],
    tokens: Sequence[int],
    fakes: Sequence[Fake],
    *,
    alphas: Sequence[float] = ALPHAS,
    input_codes: float | None = 127.0,
) -> Choice:
    """The alpha with the least squared error of the outputs of linears that share an input.

    The error is that of the coded weights on the smoothed inputs, exact by their moments, and that of inputs coded
    with a step of absmax / input_codes (None: not coded): as if every rounding were uniform and independent,
    step ** 2 / 12 an element.

    Args:
        channels: fp32 [in], absmax of each input feature.
        weights: [out, in] each, in the model's dtype.
        moments: fp32 [in, in] of the inputs of each as they are, over so many `tokens`.
        fakes: of each weight; called on whole smoothed weights.
    """
    columns = [column_absmax(weight) for weight in weights]
    choices = [smoothing(channels, columns, alpha) for alpha in alphas]
    linears = list(zip(weights, moments, tokens, fakes, strict=True))
    errors = []
    for choice in choices:
        step = (
            choice.input_absmax(channels).to(torch.float64) / input_codes if input_codes else channels.new_zeros(())
        )
        noise = step.square() / 12
        parts = [_output_error(choice.smooth, w, m, count * noise, fake) for w, m, count, fake in linears]
        errors.append(torch.stack(parts).sum())
    best = first_least(torch.stack(errors))
    return Choice(alphas[best], choices[best], torch.stack(errors))


def _output_error(smooth: Tensor, weight: Tensor, moments: Tensor, noise: Tensor, fake: Fake) -> Tensor:
    """fp64 0-dim: of a smoothed weight that is coded, and of so much independent `noise` in each smoothed input."""
    coded = fake(smoothed_weight(weight, smooth))
    error = output_error(coded / smooth - weight.to(torch.float32), moments)
    return error + noise * coded.square().sum(dtype=torch.float64)
