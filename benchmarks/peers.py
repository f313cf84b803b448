"""What the main job is measured against: a plain transformers forward, and a plain sequential write.

Run as a program, so that each peer starts as cold as a rank does: `python -m benchmarks.peers forward|write ...`.
Prints seconds.
"""

import os
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from distribute.dataset import batches, read_samples

CHUNK = 8 << 20


def forward_seconds(model: Path, data: Path, samples: int, length: int, threads: int) -> float:
    """A plain forward of the calibration samples, batch by batch, as people calibrate without a tool."""
    torch.set_num_threads(threads)
    tokens = read_samples(data, model=model, samples=samples, sequence_length=length).tokens
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.inference_mode():
        loaded(tokens[0][None])  # the first call pays for kernels
        started = time.monotonic()
        for batch in batches(tokens, 8):
            loaded(batch, use_cache=False)
        return time.monotonic() - started


def write_seconds(path: Path, size: int) -> float:
    """A sequential write of `size` bytes, flushed to the disk."""
    chunk = os.urandom(CHUNK)
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, CHUNK):
            file.write(memoryview(chunk)[: min(CHUNK, size - start)])
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return seconds


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "forward":
        seconds = forward_seconds(Path(rest[0]), Path(rest[1]), *map(int, rest[2:]))
    else:
        seconds = write_seconds(Path(rest[0]), int(rest[1]))
    sys.stdout.write(f"{seconds}\n")
