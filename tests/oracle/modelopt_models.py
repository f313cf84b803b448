"""Tiny models that nvidia-modelopt quantized in memory, and what its own exporter makes of them.

    model = make_quantized("qwen3_moe", "nvfp4_kv")     # the same bits in every process and on every rank
    export_reference(model, folder)                     # uses the model up: make another one for the live export

Importing this takes 4 s: it imports modelopt. Nothing is downloaded.
"""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import (
    _process_quantized_modules,
    requantize_resmooth_fused_llm_layers,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import make_model

#: name -> (configuration of the weights and inputs, configuration of keys and values)
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "fp8": (mtq.FP8_DEFAULT_CFG, None),
    "fp8_kv": (mtq.FP8_DEFAULT_CFG, mtq.FP8_KV_CFG),
    "fp8_pc_pt": (mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, None),
    "nvfp4": (mtq.NVFP4_DEFAULT_CFG, None),
    "nvfp4_kv": (mtq.NVFP4_DEFAULT_CFG, mtq.FP8_KV_CFG),
    "nvfp4_kv4": (mtq.NVFP4_DEFAULT_CFG, mtq.NVFP4_KV_CFG),
    "w4a16_nvfp4": (mtq.W4A16_NVFP4_CFG, None),
}
#: The same of formats that the live export writes only when the reference has packed them.
PACKED_RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "int8_wo": (mtq.INT8_WEIGHT_ONLY_CFG, None),
    "int8_sq": (mtq.INT8_SMOOTHQUANT_CFG, None),
    "int4_awq": (mtq.INT4_AWQ_CFG, None),
    "w4a8_awq": (mtq.W4A8_AWQ_BETA_CFG, None),
    "mxfp8": (mtq.MXFP8_DEFAULT_CFG, None),
    "mxfp4": (mtq.MXFP4_DEFAULT_CFG, None),
    "fp8_pb_wo": (mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, None),
}


def make_quantized(kind: str, recipe: str, folder: Path | None = None, **config: Any) -> PreTrainedModel:
    """A model of `tests.models.KINDS`, loaded by transformers and calibrated on random tokens. Any ranks may call.

    `folder` is where its bf16 source is written; without one nothing is left. Each rank needs a folder of its own.
    `config` goes to `make_model`. A model with NVFP4 quantizers does not run forward on CPU.
    """
    weights, keys_values = (RECIPES | PACKED_RECIPES)[recipe]
    entries = weights["quant_cfg"] + (keys_values["quant_cfg"] if keys_values else [])
    with tempfile.TemporaryDirectory() as temporary, _reproducible():
        # With a process group, transformers would save on rank 0 only.
        with mock.patch.object(PreTrainedModel, "should_save_on_this_rank", lambda *_: True):
            source = make_model(kind, folder or Path(temporary), **config)
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
        ids = torch.randint(1, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(7))
        return mtq.quantize(model, weights | {"quant_cfg": entries}, forward_loop=lambda model: model(ids))


def export_reference(model: PreTrainedModel, folder: Path) -> Path:
    """`export_hf_checkpoint` of a model that is whole on one process. It changes the model: use it for nothing else."""
    with _reproducible():
        export_hf_checkpoint(model, export_dir=folder)
    return folder


def pack(kind: str, recipe: str, **config: Any) -> PreTrainedModel:
    """A model whose weights the reference has packed in memory: what its exporter holds before it saves."""
    model = make_quantized(kind, recipe, **config)
    with _reproducible():
        requantize_resmooth_fused_llm_layers(model)
        _process_quantized_modules(model, model.config.dtype)
    return model


@contextmanager
def _reproducible() -> Iterator[None]:
    """One thread, because sums depend on how many there are; and without the reference's warnings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
