"""Runs one checkpoint in transformers, which knows the compressed-tensors dialect: its answer and perplexity.

This reader runs in the project's own environment and measures as `nogather demo` does.
"""

from pathlib import Path
from typing import Any

import torch
from record import Tell, run_reader

from distribute.ask import load_model
from distribute.encoder import load_tokenizer
from distribute.perplexity import continue_greedily, perplexity


def read(checkpoint: Path, request: dict[str, Any], tell: Tell) -> None:
    """Load, answer, score."""
    model = load_model(checkpoint)
    tell(loaded=True)
    tokenizer = load_tokenizer(checkpoint)
    prompt = torch.tensor(tokenizer(request["prompt"])["input_ids"])
    said = continue_greedily(model, prompt, num_tokens=request["new_tokens"], stop=tokenizer.eos_token_id)
    tell(answer=tokenizer.decode(said))
    windows = [torch.tensor(ids) for ids in request["windows"]]
    tell(perplexity=perplexity(model, windows), tokens=sum(len(window) - 1 for window in windows))


if __name__ == "__main__":
    run_reader(read)
