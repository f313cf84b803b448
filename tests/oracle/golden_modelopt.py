"""What nvidia-modelopt 0.47.0 makes of the golden sources. Importing this takes 4 s.

A preset is one of its configurations, changed where a toy needs it: smaller groups, other formats for some layers, a
format for keys and values. Of presets that smooth, `chosen.safetensors` holds what the search found before layers that
share an input were averaged and the result was folded into norms:

    <module>.smooth             fp32 [in]: what the columns of the weight are multiplied by
    <module>.alpha              fp32 (): of AWQ, the exponent that gave the least loss
    <module>.loss               fp32 [11]: of AWQ, the mean square error of the output by exponent
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization import model_calib
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.golden import GOLDEN
from tests.oracle.golden_files import calibration_batch, empty, write_changed

NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
MXFP8 = {"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}
DENSE = ("llama", "qwen2", "qwen3", "mixtral")


def grouped(config: dict[str, Any], size: int) -> dict[str, Any]:
    """A configuration with int4 groups of another size."""
    config = copy.deepcopy(config)
    for entry in config["quant_cfg"]:
        stages = entry.get("cfg") or []
        for stage in stages if isinstance(stages, list) else [stages]:
            if stage.get("num_bits") == 4:
                stage["block_sizes"] = stage["block_sizes"] | {-1: size}
    return config


def with_kv(config: dict[str, Any], kv: dict[str, Any]) -> dict[str, Any]:
    return update_quant_cfg_with_kv_cache_quant(copy.deepcopy(config), kv["quant_cfg"])


def mixed() -> dict[str, Any]:
    """FP8, but NVFP4 for what is in an MLP and MXFP8 for what leads out of it."""
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    at = next(i for i, entry in enumerate(config["quant_cfg"]) if "gate" in entry["quantizer_name"])
    for pattern, cfg in (("*down_proj*", MXFP8), ("*mlp*", NVFP4)):
        for name in (f"{pattern}input_quantizer", f"{pattern}weight_quantizer*"):
            config["quant_cfg"].insert(at, {"quantizer_name": name, "cfg": copy.deepcopy(cfg)})
    return config


#: preset -> (its configuration, the cases)
PRESETS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fp8": (mtq.FP8_DEFAULT_CFG, (*DENSE, "zeros")),
    "fp8_dynamic": (mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, DENSE),
    "fp8_block": (mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, ("wide",)),
    "int8": (mtq.INT8_DEFAULT_CFG, ("llama", "mixtral", "zeros")),
    "int8_smoothquant": (mtq.INT8_SMOOTHQUANT_CFG, ("wide",)),
    "int8_weight_only": (mtq.INT8_WEIGHT_ONLY_CFG, ("llama",)),
    "int4": (mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, ("wide",)),
    "int4-32": (grouped(mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG, 32), ("llama", "zeros")),
    "int4_awq": (mtq.INT4_AWQ_CFG, ("wide",)),
    "w4a8": (mtq.W4A8_AWQ_BETA_CFG, ("wide",)),
    "nvfp4": (mtq.NVFP4_DEFAULT_CFG, ("llama", "qwen2", "mixtral", "zeros")),
    "nvfp4_weight_only": (mtq.W4A16_NVFP4_CFG, ("llama",)),
    "mxfp4": (mtq.MXFP4_DEFAULT_CFG, ("llama", "qwen2", "zeros")),
    "mxfp8": (mtq.MXFP8_DEFAULT_CFG, ("llama", "qwen2", "zeros")),
    "fp8-kv_fp8": (with_kv(mtq.FP8_DEFAULT_CFG, mtq.FP8_KV_CFG), ("qwen3",)),
    "nvfp4-kv_nvfp4": (with_kv(mtq.NVFP4_DEFAULT_CFG, mtq.NVFP4_KV_CFG), ("qwen3",)),
    "mixed": (mixed(), ("llama",)),
}


def make_all() -> None:
    """Every preset of every case."""
    for preset, (config, cases) in PRESETS.items():
        for case in cases:
            make(case, preset, config)


def make(case: str, preset: str, config: dict[str, Any]) -> None:
    """Calibrate on the one batch, then export on a single process."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / case / "source", dtype="auto").eval()
    ids = calibration_batch(case)
    chosen: dict[str, torch.Tensor] = {}
    with _recorded(model, chosen):
        mtq.quantize(model, copy.deepcopy(config), forward_loop=lambda model: model(ids))
    folder = empty(GOLDEN / case / f"modelopt-{preset}")
    export_hf_checkpoint(model, export_dir=folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # transformers' defaults, not the exporter's work
    weights = folder / "model.safetensors"
    write_changed(case, weights, load_file(weights))
    if chosen:
        save_file(chosen, folder / "chosen.safetensors")


@contextmanager
def _recorded(model: nn.Module, chosen: dict[str, torch.Tensor]) -> Iterator[None]:
    """Fill `chosen` when the reference smooths a layer."""
    smooth: Callable[..., None] = model_calib.apply_pre_quant_scale_and_smooth

    def record(linear: nn.Module, pre_quant_scale: torch.Tensor) -> None:
        name = next(name for name, module in model.named_modules() if module is linear)
        chosen[f"{name}.smooth"] = 1.0 / pre_quant_scale.float()
        if helper := getattr(linear, "awq_lite", None):
            chosen[f"{name}.alpha"] = torch.tensor(helper.best_alpha)
            chosen[f"{name}.loss"] = torch.tensor(list(helper.loss.values()))
        smooth(linear, pre_quant_scale)

    with mock.patch.object(model_calib, "apply_pre_quant_scale_and_smooth", record):
        yield
