"""Reads a checkpoint's config with the newest vLLM's own parser; its Python files stand before the CPU build's.

No weight is read and no kernel chosen: this shows that the config is understood, and as what.
"""

from pathlib import Path
from typing import Any

from record import Tell, run_reader
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.weight_utils import get_quant_config


def read(checkpoint: Path, request: dict[str, Any], tell: Tell) -> None:
    """Parse as at the start of `vllm serve`."""
    config = ModelConfig(model=str(checkpoint), dtype="bfloat16")
    tell(parsed=type(get_quant_config(config, LoadConfig())).__name__, quantization=config.quantization)


if __name__ == "__main__":
    run_reader(read)
