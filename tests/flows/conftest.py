"""One Prefect server for all flow tests, and a small checkpoint whose stages have run once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.parameters import Parameters
from tests.checkpoints import decoder_tensors, write_checkpoint


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    # Late: only tests that need a server pay three seconds for the import.
    from prefect.testing.utilities import prefect_test_harness  # noqa: PLC0415

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "model", decoder_tensors())


@pytest.fixture(scope="session")
def parameters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    """A run that needs no text; its workspace is shared, so that only the first test of a session builds."""
    workspace = tmp_path_factory.mktemp("workspace")
    return Parameters(model=str(checkpoint), recipe="fp8_dynamic", workspace=str(workspace), nproc=1)
