"""The environment of all tests, and the models that several of them share.

The environment is set while this file is imported, which is before any test imports prefect: no profile, server
or telemetry of the machine's user is used, and nothing is written outside temporary folders except the demo model,
which lies in the cache that `nogather demo-model` uses.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.demo_model import DemoText, make_demo_model, make_demo_text

_home = tempfile.TemporaryDirectory(prefix="nogather-tests-", ignore_cleanup_errors=True)
for _name in [name for name in os.environ if name.startswith(("PREFECT_", "NOGATHER_", "HF_", "AWS_"))]:
    if _name != "NOGATHER_CACHE":
        del os.environ[_name]
os.environ |= {
    "PREFECT_HOME": f"{_home.name}/prefect",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "NOGATHER_WORKSPACE": f"{_home.name}/workspace",
    # Not HF_HUB_OFFLINE: the Hub's own client is tested, against a server that answers on this machine only.
    "HF_HOME": f"{_home.name}/huggingface",
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(kind, **sizes)`: the folder of a `tests.models` checkpoint, made once. Copy it to change it."""
    from tests.models import make_model  # noqa: PLC0415  late: transformers reads HF_* when it is imported

    made: dict[str, Path] = {}

    def make(kind: str, **sizes: Any) -> Path:
        key = f"{kind} {sorted(sizes.items())}"
        if key not in made:
            made[key] = make_model(kind, tmp_path_factory.mktemp(kind), **sizes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the trained demo model, shared with `make demo`: made on first use, then only read."""
    return make_demo_model()


@pytest.fixture(scope="session")
def demo_text() -> DemoText:
    """English text for calibrating and for measuring, shared with `make demo`."""
    return make_demo_text()
