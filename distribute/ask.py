"""Ask a checkpoint: what does it say after a prompt, and how well does it predict held-out text?

    python -m distribute.ask MODEL --prompt TEXT --heldout FILE [--tokens 4096] [--new-tokens 16]

Prints one JSON object: {"answer", "perplexity", "tokens", "digest"}. bf16 and compressed-tensors checkpoints are run
by transformers as they are: quantized inputs are rounded as an engine would round them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from distribute.dataset import read_samples
from distribute.encoder import load_tokenizer
from distribute.errors import SourceError, UserError
from distribute.job import read_json
from distribute.perplexity import continue_greedily, perplexity
from distribute.ranks import Ranks

WINDOW = 512  # tokens
#: quant_method of checkpoints that transformers runs; None is one without a quantization_config.
RUNNABLE = (None, "compressed-tensors")


def ask(
    folder: Path, *, prompt: str, heldout: Path, tokens: int, new_tokens: int, device: torch.device
) -> dict[str, Any]:
    """Load the checkpoint and answer.

    Args:
        tokens: how much of `heldout` is read, in windows of 512 tokens spread over the text; the same windows for
            the same text and tokenizer. The first token of a window is not predicted.

    Raises:
        UserError: the checkpoint or the text cannot be used.
    """
    samples = read_samples(heldout, model=folder, samples=max(tokens // WINDOW, 1), sequence_length=WINDOW)
    model = load_model(folder).to(device)
    tokenizer = load_tokenizer(folder)
    ids = torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.int64)
    answer = continue_greedily(model, ids, num_tokens=new_tokens, stop=tokenizer.eos_token_id)
    return {
        "answer": tokenizer.decode(answer),
        "perplexity": perplexity(model, samples.tokens),
        "tokens": sum(len(window) - 1 for window in samples.tokens),
        "digest": samples.report["data_digest"],
    }


def load_model(folder: Path) -> nn.Module:
    """The model with the dtypes it has on disk.

    Raises:
        SourceError: transformers cannot run it.
    """
    try:
        method = (read_json(folder / "config.json").get("quantization_config") or {}).get("quant_method")
        if method not in RUNNABLE:
            raise SourceError(
                f"{folder} is quantized in the {method} dialect, which inference engines run and transformers does "
                "not; export with the dialect compressed-tensors to run it here"
            )
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    except (OSError, ImportError) as error:
        raise SourceError(f"{folder} cannot be loaded: {' '.join(str(error).split())}") from None


def main() -> int:
    """The command; exit code 2 and one line on stderr for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="python -m distribute.ask")
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=16)
    given = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with Ranks.start() as ranks:
            answer = ask(
                given.model,
                prompt=given.prompt,
                heldout=given.heldout,
                tokens=given.tokens,
                new_tokens=given.new_tokens,
                device=ranks.device,
            )
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
