"""`make engines`, or `python -m benchmarks.engines [--only PATTERN] [--engine KEY] [--again] [--page]`.

Installs the engines where they are missing, makes a checkpoint of the demo model for every preset and dialect, tries
each in every engine, one at a time, and writes docs/engines.md. What is done is kept: a rerun goes on.
"""

import argparse
import datetime
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.engines.cases import SOURCES, Case, all_cases, make_checkpoint
from benchmarks.engines.install import home_folder, install_all
from benchmarks.engines.measure import Record, append_record, digest_of, read_records, try_engine
from benchmarks.engines.page import Page
from benchmarks.engines.table import ENGINES, Engine
from distribute.dataset import read_samples
from flows.demo import PROMPT
from tasks.demo_model import make_demo_model, make_demo_text

log = logging.getLogger("engines")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
WINDOW, NEW_TOKENS = 512, 8
#: Engine key of the records of recipes that this project refuses.
OURSELVES = "nogather"


def main() -> None:
    """Install, make, try, write."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    home = home_folder()
    cases, path = all_cases(), home / "records.jsonl"
    engines = [replace(engine, version=engine.version or version(engine.key)) for engine in ENGINES]
    if not options.page:
        install_all(home)
        chosen = [case for case in cases if case in SOURCES or fnmatchcase(case.key, options.only)]
        try_all(chosen, [one for one in engines if fnmatchcase(one.key, options.engine)], path, home, options)
    records = read_records(path)
    refused = {key[:2]: record.error for key, record in records.items() if record.engine == OURSELVES}
    page = Page(cases, engines, records, refused)
    PAGE.write_text(page.make_text(prompt=PROMPT, date=datetime.date.today()), encoding="utf-8")
    log.info("wrote %s", PAGE)


def try_all(
    cases: Sequence[Case], engines: Sequence[Engine], path: Path, home: Path, options: argparse.Namespace
) -> None:
    """Make and try what has no record yet; every result is kept at once."""
    model, text = make_demo_model(), make_demo_text()
    windows = read_samples(
        text.heldout, model=model, samples=max(options.tokens // WINDOW, 1), sequence_length=WINDOW
    ).tokens
    request = {"prompt": PROMPT, "new_tokens": NEW_TOKENS, "windows": [window.tolist() for window in windows]}
    for case in cases:
        if options.again and case not in SOURCES:
            shutil.rmtree(home / "checkpoints" / case.key, ignore_errors=True)
        checkpoint = make_checkpoint(case, model, text, home, samples=options.samples)
        if checkpoint is None:
            continue
        if isinstance(checkpoint, str):
            log.info("%-32s nogather: %s", case.key, checkpoint)
            append_record(path, Record(case.name, case.dialect, OURSELVES, "", error=checkpoint))
            continue
        append_record(path, Record(case.name, case.dialect, OURSELVES, ""))
        for engine in engines:
            try_one(case, engine, checkpoint, request, path, home, options)


def try_one(
    case: Case,
    engine: Engine,
    checkpoint: Path,
    request: dict[str, Any],
    path: Path,
    home: Path,
    options: argparse.Namespace,
) -> None:
    """Try, unless the same was tried or there is nothing to help."""
    records, made_of = read_records(path), digest_of(engine, checkpoint, request)
    first = records.get((case.name, case.dialect, engine.after))
    if engine.after and (first is None or not first.error):
        return
    if engine.parses and case in SOURCES:
        return
    known = records.get((case.name, case.dialect, engine.key))
    if known is not None and known.made_of == made_of:
        return
    log_file = home / "logs" / f"{case.key}.{engine.key}.log"
    found = try_engine(engine, checkpoint, request, home=home, time_limit_s=options.time_limit, log_file=log_file)
    if "error" in found:
        found["error"] = found["error"].replace(str(checkpoint), "CHECKPOINT")
    kept = {name: found[name] for name in Record.__dataclass_fields__ if name in found}
    record = Record(case.name, case.dialect, engine.key, made_of, **kept)
    append_record(path, record)
    said = record.error or record.parsed or f"{record.answer!r}, perplexity {record.perplexity}"
    log.info("%-32s %-14s %5.1f s  %s", case.key, engine.key, record.seconds, " ".join(said.split())[:300])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of cases, like 'fp8*' or '*.modelopt'")
    parser.add_argument("--engine", default="*", help="pattern of engines, like 'vllm*'")
    parser.add_argument("--again", action="store_true", help="make the checkpoints anew, after a change of the code")
    parser.add_argument("--page", action="store_true", help="only write the page from what is recorded")
    parser.add_argument("--tokens", type=int, default=2048, help="held-out tokens to predict")
    parser.add_argument("--samples", type=int, default=32, help="calibration samples of 512 tokens")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one engine and checkpoint")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
