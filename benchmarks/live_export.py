"""Saving a live FSDP2 model against the other published ways, in one run: `python -m benchmarks.live_export`.

    seconds     from a barrier before to a barrier after, files flushed (ours also reads them back for sha256)
    memory      VmHWM of the save over that before it, the largest of the ranks
    travelled   bytes received on the loopback device of a network namespace that holds nothing but this job
    written     bytes the kernel was given to write to disk, over the bytes of the checkpoint

Each method gets a torchrun job of its own; repeats alternate between the methods. The machine should be idle.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.live_peers import METHODS
from benchmarks.random_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, VOCAB

MB = 1e6


def make_sharded(layers: int) -> torch.nn.Module:
    """A Llama of random bf16 weights, of which each rank makes its own shards only. Called by all ranks."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.detach().to_local().uniform_(-0.05, 0.05, generator=generator)
    return model


def rank_main(method: str, folder: str, layers: int, shard_bytes: int) -> None:
    """One rank of one measurement; rank 0 prints the figures of all."""
    dist.init_process_group("gloo")
    model = make_sharded(layers)
    dist.barrier()
    before = _counters()
    started = time.monotonic()
    METHODS[method](model, Path(folder), shard_bytes)
    dist.barrier()
    seconds = time.monotonic() - started
    after = _counters()
    own = torch.tensor([after[key] - before[key] for key in ("memory", "written")], dtype=torch.float64)
    travelled = after["received"] - before["received"]
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    if dist.get_rank() == 0:
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        figures = {
            "seconds": seconds, "memory": max(float(row[0]) for row in rows), "travelled": travelled,
            "written": sum(float(row[1]) for row in rows), "checkpoint": size,
        }  # fmt: skip
        sys.stdout.write(f"FIGURES {json.dumps(figures)}\n")
    dist.destroy_process_group()


def measure(method: str, folder: Path, nproc: int, layers: int, shard_bytes: int) -> dict[str, Any]:
    """Figures of one job in a network namespace of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    inner = f"ip link set lo up && exec {sys.executable} -m torch.distributed.run --standalone --local-addr 127.0.0.1"
    inner += f" --nproc-per-node {nproc} -m benchmarks.live_export --rank {method} --folder {folder}"
    inner += f" --layers {layers} --shard-bytes {shard_bytes}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(["unshare", "-rn", "sh", "-c", inner], capture_output=True, text=True, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return json.loads(line.removeprefix("FIGURES "))
    raise SystemExit(f"{method} failed:\n{done.stderr[-4000:]}")


def report(results: dict[str, list[dict[str, Any]]]) -> Table:
    """Medians of every method."""
    table = Table(
        "method", "seconds", "against ours", "peak memory", "travelled", "of checkpoint", "written", "spread"
    )
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    for name, figures in median.items():
        seconds = [run["seconds"] for run in results[name]]
        table.add_row(
            name, f"{figures['seconds']:.2f}", f"{figures['seconds'] / median['nogather']['seconds']:.2f}x",
            f"{figures['memory'] / MB:.0f} MB", f"{figures['travelled'] / MB:.2f} MB",
            f"{100 * figures['travelled'] / figures['checkpoint']:.3f} %",
            f"{figures['written'] / figures['checkpoint']:.3f}", f"{min(seconds):.2f}-{max(seconds):.2f} s",
        )  # fmt: skip
    return table


def _counters() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    loopback = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return {
        "memory": int(peak.split()[1]) * 1024,
        "written": int(io["write_bytes"]) - int(io["cancelled_write_bytes"]),
        "received": int(loopback.split()[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("benchmark-live"), help="on the disk to measure")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="120 MB each, and 262 MB besides")
    parser.add_argument("--shard-bytes", type=int, default=400_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, str(options.folder), options.layers, options.shard_bytes)
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for _ in range(options.repeats):
        for name, runs in results.items():
            runs.append(measure(name, options.folder.resolve(), options.nproc, options.layers, options.shard_bytes))
    shutil.rmtree(options.folder, ignore_errors=True)
    Console(width=130).print(report(results))


if __name__ == "__main__":
    main()
