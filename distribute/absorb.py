"""Tensors that take up a smoothing: what they become, and whether the layer still gives the same outputs.

Owns the question how a norm uses its weight, which is answered by running it, not by its name.
"""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from distribute.errors import StageError
from distribute.layerwise import Part

#: How far the outputs of a layer may move when smoothing is folded, in roundings of the model's dtype.
ROUNDINGS = 8
LEAST_TOLERANCE = 1e-4


def absorbed(tensor: Tensor, factor: Tensor, owner: nn.Module, *, is_norm_weight: bool) -> Tensor:
    """A norm's weight or a bias [n], in its dtype, with which `owner` gives `factor` fp32 [n] times as much."""
    value, factor = tensor.to(torch.float32), factor.to(tensor.device)
    if is_norm_weight and is_zero_centred(owner):
        return ((value + 1.0) * factor - 1.0).to(tensor.dtype)
    return (value * factor).to(tensor.dtype)


def is_zero_centred(norm: nn.Module) -> bool:
    """Whether a norm multiplies by 1 + weight: then it gives something with weights of zero."""
    zeros = {name: torch.zeros_like(parameter) for name, parameter in norm.named_parameters()}
    like = next(iter(zeros.values()))
    x = torch.linspace(-1, 1, like.numel(), dtype=like.dtype, device=like.device)
    with torch.no_grad():
        return bool(functional_call(norm, zeros, (x[None],)).abs().amax() > 0)


def check_outputs(part: Part, hidden: Tensor, before: Tensor) -> None:
    """Raise StageError unless the part makes of the first batch what it made `before` it was changed.

    Compared is what it adds to `hidden`, token by token; the median token may move by a few roundings. A router may
    send a single token elsewhere for one.
    """
    size = (before - hidden).to(torch.float32).norm(dim=-1)
    moved = (part.output(0, hidden) - before).to(torch.float32).norm(dim=-1)
    error = float((moved / size.clamp_min(torch.finfo(torch.float32).tiny)).median())
    limit = max(LEAST_TOLERANCE, ROUNDINGS * torch.finfo(before.dtype).eps)
    if not error <= limit:
        raise StageError(
            f"smoothing folded into the norms and linear layers of {part.path} moves its outputs by {error:.1%} "
            f"(allowed: {limit:.1%}): this architecture is wired in a way that is not known here; "
            "use a preset without smoothing for these layers"
        )
