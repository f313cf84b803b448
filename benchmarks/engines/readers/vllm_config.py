"""Reads a checkpoint's config with the newest vLLM's own parser; its Python files stand before the CPU build's.

No weight is read and no kernel chosen: this shows that the config is understood, and as which scheme.
"""

from pathlib import Path
from typing import Any

from ask_scheme import scheme_of_layer
from record import Tell, run_reader
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.weight_utils import get_quant_config

SCHEMES = "vllm.model_executor.layers.quantization.compressed_tensors.schemes"


def read(checkpoint: Path, request: dict[str, Any], tell: Tell) -> None:
    """Parse as at the start of `vllm serve`."""
    config = ModelConfig(model=str(checkpoint), dtype="bfloat16")
    parsed = get_quant_config(config, LoadConfig())
    with set_current_vllm_config(VllmConfig(model_config=config, device_config=DeviceConfig("cpu"))):
        tell(parsed=scheme_of_layer(parsed, "get_scheme", SCHEMES))


if __name__ == "__main__":
    run_reader(read)
