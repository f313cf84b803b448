"""What each recipe loses, beside its peers: `python -m benchmarks.quality [--only X] [--again X] [--page]`.

Every preset is made in both dialects by this project, and by nvidia-modelopt and llm-compressor where they can, from
one model and one set of calibration samples; one judge (`judge.py`) takes their perplexity on text that nobody
calibrated with. What is done is kept in ~/.cache/nogather/quality ($NOGATHER_QUALITY): a rerun goes on where the last
one ended. llm-compressor is wanted in an environment of its own there:

    python -m venv ~/.cache/nogather/quality/llmcompressor
    ~/.cache/nogather/quality/llmcompressor/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
"""

import argparse
import datetime
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.judge import load_judged
from benchmarks.makers import OURS, PEERS, Case, Work, home_folder, make
from benchmarks.quality_page import Judged, Page
from distribute.dataset import digest_of, read_samples
from distribute.dialects.table import DIALECTS
from distribute.perplexity import perplexity
from distribute.scheme import PRESETS
from tasks.demo_model import make_demo_model, make_demo_text

log = logging.getLogger("quality")

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"
WINDOW = 512
SOURCE = "bf16"


def main() -> None:
    """Make, judge, write."""
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    work, windows = prepare(options)
    cases = all_cases()
    if not options.page:
        judge(SOURCE, None, work, windows)
        for case in cases:
            if fnmatchcase(case.key, options.only):
                make_and_judge(case, work, windows, again=fnmatchcase(case.key, options.again))
    found = {case: Judged(**read(work.home, case.key)) for case in cases}
    source = read(work.home, SOURCE)
    page = Page(found, source["perplexity"], samples=options.samples, tokens=len(windows) * (WINDOW - 1))
    PAGE.write_text(page.make_text(date=datetime.date.today()), encoding="utf-8")
    log.info("wrote %s", PAGE)


def all_cases() -> list[Case]:
    """Every preset in every dialect that it has, ours first."""
    makers = {dialect: (OURS, *(peer for peer, own in PEERS.items() if own == dialect)) for dialect in DIALECTS}
    return [
        Case(maker, preset, dialect)
        for preset, known in PRESETS.items()
        for dialect in DIALECTS
        if dialect not in known.refused
        for maker in makers[dialect]
    ]


def prepare(options: argparse.Namespace) -> tuple[Work, list[torch.Tensor]]:
    """What all makers are given, and held-out windows of tokens."""
    model, text = make_demo_model(), make_demo_text()
    samples = read_samples(text.calibration, model=model, samples=options.samples, sequence_length=WINDOW).tokens
    heldout = read_samples(text.heldout, model=model, samples=options.tokens // WINDOW, sequence_length=WINDOW).tokens
    home = home_folder()
    for folder in ("checkpoints", "found"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    ids = [sample.tolist() for sample in samples]
    return Work(model, text.calibration, ids, options.threads, home), heldout


def make_and_judge(case: Case, work: Work, windows: Sequence[torch.Tensor], *, again: bool) -> None:
    """Unless it was done; a checkpoint that could not be made is tried again."""
    folder = work.home / "checkpoints" / case.key
    known = read(work.home, case.key)
    if again or known.get("error") or not folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        made = make(case, work, folder)
        known = keep(work.home, case.key, asdict(made))
    if not known.get("error"):
        judge(case.key, case, work, windows)


def judge(key: str, case: Case | None, work: Work, windows: Sequence[torch.Tensor]) -> None:
    """Take the perplexity of a checkpoint (None: of the source), unless it was taken on these windows."""
    known, judged_on = read(work.home, key), digest_of([window.tolist() for window in windows])
    if known.get("judged_on") == judged_on:
        return
    if case is None:
        model = AutoModelForCausalLM.from_pretrained(work.model, dtype="auto").eval()
    else:
        model = load_judged(work.model, work.home / "checkpoints" / key, case.scheme, case.dialect)
    found = perplexity(model, windows)
    log.info("%-44s %.3f", key, found)
    keep(work.home, key, known | {"perplexity": found, "judged_on": judged_on})


def read(home: Path, key: str) -> dict[str, Any]:
    """What was found of a checkpoint so far."""
    path = home / "found" / f"{key}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep(home: Path, key: str, found: dict[str, Any]) -> dict[str, Any]:
    """Write it down."""
    (home / "found" / f"{key}.json").write_text(json.dumps(found), encoding="utf-8")
    return found


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of MAKER.PRESET.DIALECT")
    parser.add_argument("--again", default="", help="pattern of what is made anew, like 'nogather.*'")
    parser.add_argument("--page", action="store_true", help="only write the page from what is known")
    parser.add_argument("--samples", type=int, default=32, help="calibration samples of 512 tokens")
    parser.add_argument("--tokens", type=int, default=20480, help="held-out tokens")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
