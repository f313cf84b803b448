"""Calibration, quantization and export against both peers: `python -m benchmarks.algorithms [--only PATTERN]`.

Same model, samples and thread count for all, who take turns in one run; each works in a process of its own. What
counts is the median of its seconds from opening the model to the written checkpoint, without imports. Beside it
stand the CPU seconds of the same work, which others on the machine disturb less; the wall time of the whole
process, imports and all; and its peak memory. A peer that is missing or fails is shown as such;
`benchmarks.quality` says how to install one.

    target   5 times faster than either peer: fp8 with static inputs, int8_smoothquant, nvfp4
             not slower: int4_awq, int4_gptq
"""

import argparse
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.makers import OURS, PEERS, Case, Made, Work, home_folder, make
from distribute.dataset import read_samples
from tasks.demo_model import make_demo_model, make_demo_text

MB = 1e6
#: Preset -> how many times faster than a peer it has to be.
TARGETS = {"fp8": 5.0, "int8_smoothquant": 5.0, "nvfp4": 5.0, "int4_awq": 1.0, "int4_gptq": 1.0}


@dataclass(frozen=True)
class Measured:
    """Medians of what a maker took; `error` of the first turn that failed."""

    seconds: float
    cpu_s: float
    wall_s: float
    peak_bytes: float
    error: str = ""

    @classmethod
    def of(cls, turns: list[Made]) -> "Measured":
        """The medians."""
        error = next((turn.error for turn in turns if turn.error), "")
        return cls(
            median(turn.seconds for turn in turns),
            median(turn.cpu_s for turn in turns),
            median(turn.wall_s for turn in turns),
            median(turn.peak_bytes for turn in turns),
            error,
        )


def main() -> None:
    """Measure preset by preset, and print each as soon as it is known."""
    options = parse()
    model, text = make_demo_model(), make_demo_text()
    samples = read_samples(text.calibration, model=model, samples=options.samples, sequence_length=512).tokens
    ids = [sample.tolist() for sample in samples]
    work = Work(model, text.calibration, ids, options.threads, home_folder() / "speed")
    console = Console(width=140)
    for preset in TARGETS:
        if fnmatchcase(preset, options.only):
            console.print(make_table(preset, measure(preset, work, options)))
            console.print(f"load {os.getloadavg()[0]:.1f}, {len(ids)} samples of 512, {options.repeats} turns")


def measure(preset: str, work: Work, options: argparse.Namespace) -> dict[Case, Measured]:
    """All makers take turns at one preset, ours in both dialects."""
    turns: dict[Case, list[Made]] = {case: [] for case in cases_of(preset, options.peers)}
    for _ in range(options.repeats):
        for case, made in turns.items():
            folder = work.home / case.key
            shutil.rmtree(folder, ignore_errors=True)
            made.append(make(case, work, folder))
            shutil.rmtree(folder, ignore_errors=True)
    return {case: Measured.of(made) for case, made in turns.items()}


def cases_of(preset: str, peers: Iterable[str]) -> list[Case]:
    """Ours beside each peer, in the peer's dialect."""
    return [Case(maker, preset, PEERS[peer]) for peer in peers for maker in (OURS, peer)]


def make_table(preset: str, measured: dict[Case, Measured]) -> Table:
    """One row a maker."""
    columns = ("maker", "dialect", "seconds", "CPU s", "wall s", "peak MB", "times faster", "by CPU s", "target")
    table = Table(*columns, title=preset)
    for row in _rows(measured):
        table.add_row(*row)
    return table


def _rows(measured: dict[Case, Measured]) -> Iterator[tuple[str, ...]]:
    for case, found in measured.items():
        if found.error:
            yield (case.maker, case.dialect, "failed", "", "", "", "", "", " ".join(found.error.split())[:120])
            continue
        own = measured[Case(OURS, case.preset, case.dialect)]
        faster, by_cpu, target = "", "", ""
        if case.maker != OURS and not own.error:
            ratio = found.seconds / own.seconds
            wanted = TARGETS[case.preset]
            faster, by_cpu = f"{ratio:.1f}", f"{found.cpu_s / own.cpu_s:.1f}"
            target = f"{wanted:.0f}: {'met' if ratio >= wanted else 'missed'}"
        numbers = (f"{taken:.1f}" for taken in (found.seconds, found.cpu_s, found.wall_s))
        yield (case.maker, case.dialect, *numbers, f"{found.peak_bytes / MB:.0f}", faster, by_cpu, target)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of presets")
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=tuple(PEERS))
    parser.add_argument("--samples", type=int, default=32, help="calibration samples of 512 tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
