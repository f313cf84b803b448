"""Write tests/golden/live: what nvidia-modelopt 0.47.0 holds of a quantized model, and what it exports of it.

    python tests/oracle/make_live_goldens.py        nvidia-modelopt 0.47.0 (dependency group `oracle`)

One JSON file a case: `<model>-<preset>.json`

    settings     distinct settings of quantizers
    quantizers   path of a quantizer -> [number of its settings, absmax or null]
    state        key of the state -> [dtype, shape], without what quantizers hold
    tensors      name in the checkpoint -> [dtype, shape]
    scales       name in the checkpoint -> value of every fp32 scale
    hf_quant_config, quantization_config
"""

import copy
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models import make_model

GOLDEN = Path(__file__).parent.parent / "golden" / "live"
MODELS = ("llama", "qwen3_moe")
PRESETS = {
    "fp8": (mtq.FP8_DEFAULT_CFG, None),
    "fp8_pc_pt": (mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, None),
    "nvfp4": (mtq.NVFP4_DEFAULT_CFG, None),
    "w4a16_nvfp4": (mtq.W4A16_NVFP4_CFG, None),
    "nvfp4-kv_fp8": (mtq.NVFP4_DEFAULT_CFG, mtq.FP8_KV_CFG),
    "fp8-kv_nvfp4": (mtq.FP8_DEFAULT_CFG, mtq.NVFP4_KV_CFG),
    "mixed": (None, None),
}


def mixed() -> dict[str, Any]:
    """FP8 for all, then NVFP4 for what is in an MLP."""
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    nvfp4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
    at = next(i for i, entry in enumerate(config["quant_cfg"]) if "gate" in entry["quantizer_name"])
    for name in ("*mlp*input_quantizer", "*mlp*weight_quantizer*"):
        config["quant_cfg"].insert(at, {"quantizer_name": name, "cfg": copy.deepcopy(nvfp4)})
    return config


def settings_of(quantizer: TensorQuantizer) -> dict[str, Any]:
    """What its properties answer, as JSON has it."""
    blocks = quantizer.block_sizes and {str(key): value for key, value in dict(quantizer.block_sizes).items()}
    return {
        "num_bits": quantizer.num_bits,
        "block_sizes": blocks,
        "axis": quantizer.axis,
        "is_enabled": quantizer.is_enabled,
        "fake_quant": quantizer.fake_quant,
        "_dynamic": bool(quantizer._dynamic),
    }


def describe(model: nn.Module) -> dict[str, Any]:
    """`settings`, `quantizers` and `state` of a quantized model."""
    settings: list[str] = []
    quantizers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            text = json.dumps(settings_of(module), sort_keys=True)
            if text not in settings:
                settings.append(text)
            amax = getattr(module, "_amax", None)
            quantizers[name] = [settings.index(text), None if amax is None else amax.float().tolist()]
    state = {
        key: kind(tensor) for key, tensor in model.state_dict().items() if key.rpartition(".")[0] not in quantizers
    }
    return {"settings": [json.loads(text) for text in settings], "quantizers": quantizers, "state": state}


def kind(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def make_case(name: str, preset: str) -> dict[str, Any]:
    """Quantize with one batch, describe, export."""
    config, kv = PRESETS[preset]
    config = mixed() if config is None else copy.deepcopy(config)
    if kv:
        config = update_quant_cfg_with_kv_cache_quant(config, kv["quant_cfg"])
    with tempfile.TemporaryDirectory() as folder:
        source = make_model(name, Path(folder) / "source", hidden=32, layers=1, experts=2)
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
        ids = torch.randint(3, 300, (4, 24), generator=torch.Generator().manual_seed(7))
        mtq.quantize(model, config, forward_loop=lambda model: model(ids))
        described = describe(model)
        target = Path(folder) / "target"
        export_hf_checkpoint(model, export_dir=target)
        tensors = load_file(target / "model.safetensors")
        return described | {
            "tensors": {key: kind(tensor) for key, tensor in sorted(tensors.items())},
            "scales": {key: t.tolist() for key, t in sorted(tensors.items()) if "_scale" in key and t.dtype == torch.float32},
            "hf_quant_config": json.loads((target / "hf_quant_config.json").read_text()),
            "quantization_config": json.loads((target / "config.json").read_text())["quantization_config"],
        }  # fmt: skip


def main() -> None:
    """Write every case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    GOLDEN.mkdir(exist_ok=True)
    for name in MODELS:
        for preset in PRESETS:
            text = json.dumps(make_case(name, preset))
            (GOLDEN / f"{name}-{preset}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
