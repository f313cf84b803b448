"""How fast weights are encoded, a format at a time: `python -m benchmarks.encode [--only PATTERN] [--profile]`.

GB/s of bf16 source on one thread, as a share of a plain copy of the same tensor, and of fp8 in the same dialect
(target: a third). All formats take turns, and the median of the turns counts; the clock is this process's own CPU
time, so that others on the machine disturb little. `--profile` adds the operations that took longest.
"""

import argparse
import os
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from distribute.dialects.table import DIALECTS
from distribute.numerics.codec import Codec
from distribute.numerics.observers import absmax
from distribute.numerics.table import find_codec
from distribute.recipe import make_recipe
from distribute.scheme import PRESETS

GB = 1e9
TARGET = 1 / 3
COPY = "copy"


def main() -> None:
    """Measure and print one table."""
    options = parse()
    torch.set_num_threads(1)
    weight = (torch.randn(options.rows, options.columns) * 0.02).to(torch.bfloat16)
    everything = codecs()
    chosen = {key: codec for key, codec in everything.items() if fnmatchcase(key, options.only)}
    chosen |= {key: everything[key] for key in {fp8_of(key) for key in chosen}}
    actions: dict[str, Callable[[], object]] = {COPY: lambda: torch.empty_like(weight).copy_(weight)}
    actions |= {key: encoder(codec, weight) for key, codec in chosen.items()}
    seconds = measure(actions, options.repeats)
    console = Console(width=120)
    console.print(make_table(seconds, weight.nbytes))
    console.print(f"load {os.getloadavg()[0]:.1f}, {options.repeats} turns, weight {list(weight.shape)} bf16")
    if options.profile:
        for key, action in actions.items():
            console.print(f"\n{key}\n{top_operations(action)}", markup=False, soft_wrap=True, highlight=False)


def codecs() -> dict[str, Codec]:
    """Every codec that a preset has in a dialect; int4 also with zero points, where there are any."""
    keys: dict[str, None] = {}
    for preset, known in PRESETS.items():
        for dialect in DIALECTS:
            if dialect not in known.refused:
                scheme = make_recipe({"preset": preset, "dialect": dialect}).scheme_of(preset)
                keys[DIALECTS[dialect].codec(scheme)] = None
    asymmetric = make_recipe({"preset": "int4", "dialect": "compressed-tensors", "symmetric": False})
    keys[DIALECTS["compressed-tensors"].codec(asymmetric.scheme_of("int4"))] = None
    return {key: find_codec(key) for key in keys}


def fp8_of(key: str) -> str:
    """The codec that a codec is compared with."""
    return f"fp8.{key.split('.')[1]}.tensor"


def encoder(codec: Codec, weight: Tensor) -> Callable[[], object]:
    """Encodes the weight; what follows from its absmax is known, as in an export."""
    rows, columns = weight.shape
    values = codec.weight_values(absmax(weight), (rows, columns), weight.dtype)
    return lambda: codec.encode(weight, values)


def measure(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each action; they take turns, and the first turn is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            started = time.process_time()
            action()
            if turn:
                taken[name].append(time.process_time() - started)
    return {name: median(times) for name, times in taken.items()}


def make_table(seconds: dict[str, float], nbytes: int) -> Table:
    """One row a format, the fastest first."""
    table = Table("format", "GB/s", "of a copy", "of fp8", f"target {TARGET:.2f}")
    for key, taken in sorted(seconds.items(), key=lambda item: item[1]):
        share = seconds[fp8_of(key)] / taken if key != COPY else 0.0
        told = (f"{share:.2f}", "met" if share >= TARGET else "missed") if share else ()
        table.add_row(key, f"{nbytes / taken / GB:.2f}", f"{seconds[COPY] / taken:.2f}", *told)
    return table


def top_operations(action: Callable[[], object]) -> str:
    """The operations that took longest, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        action()
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=6, max_name_column_width=40)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of codecs, like 'int4.*'")
    parser.add_argument("--profile", action="store_true", help="show the operations that took longest")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    return parser.parse_args()


if __name__ == "__main__":
    main()
