"""What the documentation shows runs as it stands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.torchrun import ROOT


def examples(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if block.startswith("import")]


def test_the_example_of_a_live_export_runs_under_torchrun(tmp_path: Path) -> None:
    (example,) = examples("distribute.md")
    code = [line for line in example.splitlines() if line and "import" not in line]
    assert len(code) <= 20
    script = tmp_path / "live_export.py"
    script.write_text(example, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "out")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
