"""How well a language model predicts text, and what it says. Tensors and models only: no files, no ranks."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


@torch.inference_mode()
def perplexity(model: nn.Module, windows: Sequence[Tensor]) -> float:
    """exp(mean negative log-likelihood) over all tokens but the first one of each window.

    `windows`: int64 [length], length >= 2; each is read alone, without its neighbours as context. The likelihood is
    taken in fp32 from the model's logits [1, length, vocab].
    """
    assert windows and all(len(window) >= 2 for window in windows), "nothing to predict"
    total, count = 0.0, 0
    for window in windows:
        ids = window[None].to(_device(model))
        logits = model(input_ids=ids, use_cache=False).logits
        losses = functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
        total += float(losses)
        count += len(window) - 1
    return math.exp(total / count)


@torch.inference_mode()
def continue_greedily(model: nn.Module, prompt: Tensor, *, num_tokens: int, stop: int | None = None) -> list[int]:
    """The ids of at most `num_tokens` most likely next tokens after `prompt` (int64 [length]), without `stop`."""
    ids = prompt[None].to(_device(model))
    said: list[int] = []
    for _ in range(num_tokens):
        token = int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        if token == stop:
            break
        said.append(token)
        ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
    return said


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
