"""Runs one checkpoint in vLLM's CPU build: what it answers, and the likelihood that it gives held-out text.

With NOGATHER_EMULATE=1 the operations that this build lacks are replaced (emulate.py).
"""

import math
import os
from pathlib import Path
from typing import Any

import emulate
import vllm
from record import Tell, run_reader


def read(checkpoint: Path, request: dict[str, Any], tell: Tell) -> None:
    """Load, answer, score."""
    if os.environ.get("NOGATHER_EMULATE") == "1":
        tell(emulated=emulate.install())
    windows = request["windows"]
    engine = vllm.LLM(
        model=str(checkpoint),
        dtype="bfloat16",
        max_model_len=max(map(len, windows), default=64) + 8,
        max_num_seqs=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        # Each layer's own PyTorch code in place of fused kernels: those are for other hardware or missing here.
        compilation_config={"custom_ops": ["none"]},
    )
    tell(loaded=True)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=request["new_tokens"])
    answer = engine.generate([request["prompt"]], greedy, use_tqdm=False)[0].outputs[0].text
    tell(answer=answer)
    score = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for done in engine.generate([{"prompt_token_ids": ids} for ids in windows], score, use_tqdm=False):
        for token, likely in zip(done.prompt_token_ids[1:], done.prompt_logprobs[1:], strict=True):
            total -= likely[token].logprob
            count += 1
    tell(perplexity=math.exp(total / count), tokens=count)


if __name__ == "__main__":
    run_reader(read)
