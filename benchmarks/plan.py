"""A dry run at full size, from headers alone: `python -m benchmarks.plan FOLDER [--ranks 1000]`.

A mixture of experts with a trillion parameters in 590,000 tensors is made of stubs (headers before holes, no room
taken), then opened, planned and shared among pretend ranks, as `nogather plan --ranks` does. Prints seconds and peak
memory of each step. Targets: a plan in 60 s and 2 GB; the busiest rank encodes at most 5 % more than the mean.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distribute.plan import make_plan
from distribute.recipe import make_recipe
from distribute.sizes import parse_size
from distribute.source import INDEX_NAME, Checkpoint
from distribute.work import spread
from tasks.headers import write_stub

HIDDEN, MOE, HEADS, HEAD_DIM, VOCAB, LAYERS, EXPERTS = 4096, 416, 64, 128, 160_000, 96, 2048
MB = 1_000_000


def shapes(layers: int, experts: int, moe: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen3-MoE-like model, file by file."""
    expert_shapes = {"gate_proj": (moe, HIDDEN), "up_proj": (moe, HIDDEN), "down_proj": (HIDDEN, moe)}
    outside = ("model.embed_tokens.weight", "lm_head.weight")
    yield dict.fromkeys(outside, (VOCAB, HIDDEN)) | {"model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (8 * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (8 * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}.mlp.gate.weight": (experts, HIDDEN),
        }
        for start in range(0, experts, 512):
            yield {
                f"{prefix}.mlp.experts.{expert}.{leaf}.weight": shape
                for expert in range(start, min(start + 512, experts))
                for leaf, shape in expert_shapes.items()
            }


def make_stubs(folder: Path, layers: int, experts: int, moe: int = MOE) -> Path:
    """Write config.json, index and stubs of a bf16 checkpoint; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(shapes(layers, experts, moe), 1):
        name, end, header = f"model-{number:05d}.safetensors", 0, dict[str, Any]()
        for key, shape in part.items():
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        write_stub(folder / name, header)
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": layers,
        "hidden_size": HIDDEN, "num_experts": experts, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def peak_memory() -> int:
    """VmHWM of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Make the stubs where there are none, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--recipe", default="fp8")
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        make_stubs(options.folder, options.layers, options.experts)
        sys.exit("stubs are made; run again, so that making them is not in the figures")
    started = time.perf_counter()

    def tell(what: str, **figures: Any) -> None:
        shown = ", ".join(f"{key} {value}" for key, value in figures.items())
        seconds = time.perf_counter() - started
        used = f"{seconds:6.1f} s ({time.process_time():.1f} s of CPU)  peak {peak_memory() / MB:5.0f} MB"
        sys.stdout.write(f"{what:7s} {used}  {shown}\n")

    checkpoint = Checkpoint.open(options.folder)
    tell("open", tensors=len(checkpoint.tensors), parameters=f"{checkpoint.nbytes / 2:.4g}")
    plan = make_plan(checkpoint, make_recipe({"preset": options.recipe}), parse_size(options.max_shard_size))
    tell("plan", tensors=len(plan.outputs), files=len(plan.files), bytes=f"{plan.nbytes:.4g}")
    work = spread(plan, options.ranks)
    for what, figures in work.summary().items():
        tell(what, ranks=options.ranks, **figures)
    tell("files", busiest=max(work.files), mean=sum(work.files) / len(work.files))


if __name__ == "__main__":
    main()
