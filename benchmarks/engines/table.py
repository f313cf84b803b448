"""The engines that are tried. A new one is a reader in readers/ and an entry here."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engines.install import pinned_version

READERS = Path(__file__).parent / "readers"
#: The engine in the reader's process, so that its own error is what is seen; a small K/V cache.
ONE_PROCESS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass(frozen=True)
class Engine:
    """One column of the page. Paths are under the home of the engines; no `environment`: this project's own."""

    key: str
    title: str
    version: str
    reader: str
    environment: str = ""
    python_path: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    #: Tried only on what this other engine did not run.
    after: str = ""
    #: Reads the config and stops there.
    parses: bool = False

    @property
    def path(self) -> Path:
        """The reader's file."""
        return READERS / f"{self.reader}.py"


VLLM_CPU = pinned_version("vllm-cpu", "vllm-cpu")

ENGINES = (
    Engine("transformers", "transformers", "", "transformers_run"),
    Engine("vllm", "vLLM CPU build", VLLM_CPU, "vllm_cpu", "vllm-cpu", variables=ONE_PROCESS),
    Engine(
        "vllm-emulated", "vLLM emulated", VLLM_CPU, "vllm_cpu", "vllm-cpu",
        variables=ONE_PROCESS | {"NOGATHER_EMULATE": "1"}, after="vllm",
    ),
    Engine("mistralrs", "mistral.rs", pinned_version("mistralrs", "mistralrs"), "mistral", "mistralrs"),
    Engine(
        "vllm-config", "vLLM config", pinned_version("parsers", "vllm"), "vllm_config", "vllm-cpu", "parsers/vllm",
        parses=True,
    ),
    Engine(
        "sglang-config", "SGLang config", pinned_version("parsers", "sglang"), "sglang_config", "vllm-cpu",
        "parsers/sglang", parses=True,
    ),
)  # fmt: skip
