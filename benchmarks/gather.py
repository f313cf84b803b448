"""What rank 1 holds reaches rank 0: `distribute`'s gathers, the pickle method and a memcpy, in one run.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.gather results.json

    ours            get_tensors_parallel and get_configs_parallel
    pickle          torch.save into shared memory, torch.load out of it (benchmarks/shm_pickle.py)
    pickle, cut     the same for configs, with the reader told where the pickle ends
    memcpy          rank 1 copies its tensors to memory that it did not have: what any exchange by a copy must do

Targets: at 64 MB and above at least 10 times as fast as pickle, and at least 0.7 of memcpy. Methods take turns in
each repeat, so that a busy machine slows all of them alike. Seconds are those of the slowest rank for the whole
`with` block with an empty body; "read" is the same with a body that reads every byte once on rank 0. Peak memory is
the growth of VmHWM over the block, both ranks added: mapped shared memory counts in each. Bytes that crossed are
counted where they cross: in the segment, and in `Control.bytes_sent`.
"""

import argparse
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import shm_pickle
from distribute import delivery, gather
from distribute.control import Control

MB = 1_000_000
SIZES = (1, 8, 64, 256, 1000)  # MB
COUNTS = (1, 45, 1000, 20_000)
TENSOR_ELEMENTS = 1024  # of each tensor in a config: a scale vector
Tensors = dict[str, torch.Tensor]
Block = Callable[[], AbstractContextManager[Any]]


@dataclass
class Figures:
    """What one method did with one load, a value for each repeat."""

    method: str
    load: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # both ranks
    crossed_bytes: list[int] = field(default_factory=list)
    error: str = ""


class Segments:
    """Counts the bytes of the segments that this rank writes for another."""

    def __init__(self) -> None:
        self.nbytes = 0
        write = delivery.write_segment

        def counted(nbytes: int, *rest: Any, **named: Any) -> Path:
            self.nbytes += nbytes
            return write(nbytes, *rest, **named)

        delivery.write_segment = counted


@contextmanager
def memcpy(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Rank 1 copies its tensors, one by one. torch.empty would hand out memory that the process has used before."""
    copies = []
    if dist.get_rank() == 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages would be slower
        fresh = torch.frombuffer(memory, dtype=torch.uint8).split([tensor.nbytes for tensor in tensors.values()])
        copies = [to.copy_(tensor.view(torch.uint8)) for to, tensor in zip(fresh, tensors.values(), strict=True)]
    yield copies


def read_all(tensors: Any) -> None:
    """Read every byte once."""
    for tensor in tensors:
        tensor.view(torch.int64).max()


def peak_memory() -> int:
    """VmHWM of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(figures: Figures, block: Block, found: Callable[[Any], Any], segments: Segments, *, read: bool) -> None:
    """Run a block once on both ranks and add to the figures. `found`: tensors of rank 1 in what it yields."""
    control = Control.of([0, 1])
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): VmHWM starts again from now
    memory, sent, written, error = peak_memory(), control.bytes_sent, segments.nbytes, ""
    dist.barrier()
    started = time.perf_counter()
    try:
        with block() as values:
            if read and values:
                read_all(found(values))
    except RuntimeError as failure:  # the pickle method's own
        error = " ".join(str(failure).split())
    seconds = time.perf_counter() - started
    crossed = control.bytes_sent - sent + segments.nbytes - written
    mine = {"seconds": seconds, "peak": peak_memory() - memory, "crossed": crossed, "error": error}
    both = list(control.exchange("figures", mine).values())
    figures.error = figures.error or "".join(one["error"] for one in both)
    (figures.read_seconds if read else figures.seconds).append(max(one["seconds"] for one in both))
    figures.peak_bytes.append(sum(one["peak"] for one in both))
    figures.crossed_bytes.append(sum(one["crossed"] for one in both))


def blocks_of(tensors: Tensors, *, config: bool) -> dict[str, tuple[Block, Callable[[Any], Any]]]:
    """By method: the block to enter, and how to get rank 1's tensors from what it yields."""
    copy = (partial(memcpy, tensors), lambda copies: copies)
    if not config:
        tensor = tensors["0"]
        return {
            "ours": (partial(gather.get_tensors_parallel, tensor, [0, 1]), lambda both: both[1:]),
            "pickle": (partial(shm_pickle.gather_tensors, tensor), lambda both: both[1:]),
            "memcpy": copy,
        }
    plain = {"layers": len(tensors), "name": "decoder"}
    pickle = partial(shm_pickle.gather_configs, plain, tensors)
    return {
        "ours": (
            partial(gather.get_configs_parallel, plain | {"tensors": tensors}, [0, 1], None),
            lambda both: both[1]["tensors"].values(),
        ),
        "pickle": (pickle, lambda both: both[1].values()),
        "pickle, cut": (partial(pickle, cut=True), lambda both: both[1].values()),
        "memcpy": copy,
    }


def measure_load(load: str, tensors: Tensors, segments: Segments, *, config: bool, repeats: int) -> list[Figures]:
    """All methods on one load, in turns; the first turn does not count. Called by both ranks."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    blocks = blocks_of(tensors, config=config)
    made: dict[str, Figures] = {}
    for turn in range(repeats + 1):
        if turn <= 1:
            made = {method: Figures(method, load, nbytes) for method in blocks}
        for read in (False, True):
            for method, (block, found) in blocks.items():
                measure(made[method], block, found, segments, read=read)
    return list(made.values())


def table(rows: list[Figures]) -> str:
    """Markdown: medians, and how many times as fast as each peer ours is."""
    lines = [
        "| load | method | ms | ms with read | GB/s | ours is faster by | peak MB | bytes that crossed |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    ours = {row.load: median(row.seconds) for row in rows if row.method == "ours"}
    for row in rows:
        if row.error:
            lines.append(f"| {row.load} | {row.method} | fails: {row.error[:90]} | | | | | |")
            continue
        seconds, read = median(row.seconds), median(row.read_seconds)
        cells = (
            row.load, row.method, f"{seconds * 1e3:.1f}", f"{read * 1e3:.1f}", f"{row.nbytes / seconds / 1e9:.2f}",
            f"{seconds / ours[row.load]:.2f}", f"{max(row.peak_bytes) / MB:.0f}",
            f"{max(row.crossed_bytes):,}" if row.method == "ours" else "",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Called by both ranks; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="JSON file of all figures")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="MB of one tensor")
    parser.add_argument("--counts", type=int, nargs="*", default=COUNTS, help="tensors of one config")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    segments, rows = Segments(), []
    for size in options.sizes:
        tensor = torch.randint(0, 255, (size * MB,), dtype=torch.uint8)
        rows += measure_load(f"{size} MB", {"0": tensor}, segments, config=False, repeats=options.repeats)
    for count in options.counts:
        tensors = {f"layers.{i}.weight_scale": torch.randn(TENSOR_ELEMENTS) for i in range(count)}
        rows += measure_load(f"{count} tensors", tensors, segments, config=True, repeats=options.repeats)
    if dist.get_rank() == 0:
        sys.stdout.write(table(rows) + "\n")
        if options.results:
            options.results.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
