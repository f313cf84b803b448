"""The main job against named peers and physical limits, all in one run: `python -m benchmarks.main_job`.

    stages      seconds and peak memory per rank of each stage, on the demo model
    calibrate   tokens/s against a plain transformers forward of the same tokens on the same cores (target 0.9)
    export      bytes/s against a plain sequential write of the same bytes, flushed (target 0.8)
    memory      peak memory of an export rank for a model of 1 GB and one of 3 GB (target 600 MB, no growth)
    flow        `nogather run` against `nogather run --direct`: with a running Prefect server (target 5 s more),
                and with the embedded one

The machine should be idle. Every ratio has both of its sides in the output.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.random_model import make_random_model
from tasks.demo_model import cache_folder, make_demo_model, make_demo_text

MB = 1e6
Row = tuple[str, str, str]


def nogather(workspace: Path, *args: str, **environment: str) -> tuple[dict[str, Any], float]:
    """(JSON summary, wall seconds) of one command line run."""
    argv = [str(Path(sys.executable).with_name("nogather")), *args, "--workspace", str(workspace), "--json"]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout), time.monotonic() - started


def peer(*args: str) -> float:
    """Seconds of one peer, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *args], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def results(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """result.json of every stage of a run."""
    folders = {row["stage"]: Path(row["folder"]) for row in summary["stages"]}
    return {stage: json.loads((folder / "result.json").read_text()) for stage, folder in folders.items()}


def measure_stages(workspace: Path, nproc: int, samples: int) -> list[Row]:
    """The main job on the demo model, and calibration against its peer."""
    model = make_demo_model(cache_folder() / "smollm2-135m-instruct")
    text = make_demo_text(cache_folder() / "text")
    calibration = ["--calib", str(text.calibration), "--samples", str(samples), "--seq-len", "512"]
    summary, wall = nogather(workspace, "run", str(model), *calibration, "--nproc", str(nproc), "--direct")
    done = results(summary)
    rows = [
        (
            f"stage {stage}",
            f"{result['seconds']:.1f} s",
            f"peak {max(result['peak_memory_bytes']) / MB:.0f} MB a rank",
        )
        for stage, result in done.items()
    ]
    figures = done["calibrate"]["figures"]
    ours = figures["tokens"] / figures["observe_seconds"]
    plain = figures["tokens"] / peer("forward", str(model), str(text.calibration), str(samples), "512", str(nproc))
    return [
        *rows,
        ("whole run, --direct", f"{wall:.1f} s", f"{samples} samples, {nproc} ranks"),
        ("calibrate against forward", f"{ours / plain:.2f}", f"{ours:.0f} and {plain:.0f} tokens/s, target 0.9"),
    ]


def measure_export(workspace: Path, nproc: int) -> list[Row]:
    """Export of random models of 1 GB and 3 GB: speed against a plain write, memory against each other."""
    rows: list[Row] = []
    peaks = []
    for layers in (6, 24):
        model = make_random_model(workspace / f"random-{layers}", layers=layers)
        summary, _ = nogather(
            workspace, "run", str(model), "--recipe", "fp8_dynamic", "--nproc", str(nproc), "--direct"
        )
        export = results(summary)["export"]
        size = export["figures"]["bytes"]
        peaks.append(max(export["peak_memory_bytes"]))
        plain = peer("write", str(workspace / "plain.bin"), str(size))
        ours = export["seconds"]
        rows.append((
            f"export of {size / MB:.0f} MB against write", f"{plain / ours:.2f}",
            f"{size / ours / MB:.0f} and {size / plain / MB:.0f} MB/s, target 0.8",
        ))  # fmt: skip
    return [*rows, ("export memory, 1 GB and 3 GB model", f"{peaks[1] / peaks[0]:.2f}",
                    f"{peaks[0] / MB:.0f} and {peaks[1] / MB:.0f} MB a rank, target 600 MB")]  # fmt: skip


def measure_flow(workspace: Path, nproc: int) -> list[Row]:
    """What Prefect adds, on a job short enough that nothing else matters."""
    model = make_random_model(workspace / "random-1", layers=1)
    job = ["run", str(model), "--recipe", "fp8_dynamic", "--nproc", str(nproc)]
    _, direct = nogather(workspace / "direct", *job, "--direct")
    home = {
        "PREFECT_HOME": str(workspace / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    _, embedded = nogather(workspace / "embedded", *job, **home)
    with prefect_server(home) as url:
        _, served = nogather(workspace / "served", *job, **home, PREFECT_API_URL=url)
    return [
        (
            "flow over direct, running server",
            f"{served - direct:.1f} s",
            f"{served:.1f} and {direct:.1f} s, target 5 s",
        ),
        ("flow over direct, embedded server", f"{embedded - direct:.1f} s", f"{embedded:.1f} and {direct:.1f} s"),
    ]


@contextmanager
def prefect_server(environment: dict[str, str], port: int = 14218) -> Iterator[str]:
    """A Prefect server of our own; yields its API address."""
    argv = [
        str(Path(sys.executable).with_name("prefect")),
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(
        argv, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}/api"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def main() -> None:
    """Run what is asked for and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workspace", type=Path, help="an empty folder on the disk to measure, with 15 GB free")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--only", choices=("stages", "export", "flow"))
    options = parser.parse_args()
    parts = {
        "stages": lambda: measure_stages(options.workspace, options.nproc, options.samples),
        "export": lambda: measure_export(options.workspace, options.nproc),
        "flow": lambda: measure_flow(options.workspace, options.nproc),
    }
    table = Table("what", "figure", "measured")
    for name, measure in parts.items():
        if options.only in (None, name):
            for row in measure():
                table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
