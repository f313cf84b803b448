"""Runs one checkpoint in mistral.rs on the CPU, an engine that shares no code with the others: what it answers.

It gives no likelihood of a prompt, so there is no perplexity. It wants `rope_theta` at the top of config.json, where
transformers 5 writes it under `rope_parameters`: it gets a folder of links to the checkpoint and a config with both.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from mistralrs import Architecture, CompletionRequest, Runner, Which
from record import Tell, run_reader


def read(checkpoint: Path, request: dict[str, Any], tell: Tell) -> None:
    """Load, answer."""
    with tempfile.TemporaryDirectory() as folder:
        which = Which.Plain(model_id=str(link_checkpoint(checkpoint, Path(folder))), arch=Architecture.Llama)
        runner = Runner(which=which, max_seqs=1, prefix_cache_n=0)
        tell(loaded=True)
        asked = CompletionRequest(
            prompt=request["prompt"], model="", max_tokens=request["new_tokens"], temperature=0.0
        )
        tell(answer=runner.send_completion_request(asked).choices[0].text)


def link_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Fill `folder` with links to the files of the checkpoint, but for the changed config."""
    for path in checkpoint.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config.setdefault("rope_theta", (config.get("rope_parameters") or {}).get("rope_theta"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


if __name__ == "__main__":
    run_reader(read)
