"""One checkpoint made by llm-compressor 0.14, in its own environment: `PYTHON peer_llmcompressor.py JOB.json`.

JOB holds the model's folder, the calibration samples as token ids, the preset, a group size and the folder to write;
what is printed last is one line of JSON: seconds of everything but imports, and peak memory. Imports nothing of this
project, which is not installed there.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM

#: preset -> its name of the scheme, and modifiers that go before.
SCHEMES: dict[str, tuple[str, list[Any]]] = {
    "fp8": ("FP8", []),
    "fp8_dynamic": ("FP8_DYNAMIC", []),
    "fp8_block": ("FP8_BLOCK", []),
    "int8": ("W8A8", []),
    "int8_smoothquant": ("W8A8", [SmoothQuantModifier]),
    "int8_weight_only": ("W8A16", []),
    "int4": ("W4A16", []),
    "int4_awq": ("W4A16", [AWQModifier]),
    "int4_gptq": ("W4A16", []),
    "nvfp4": ("NVFP4", []),
    "nvfp4_awq": ("NVFP4", [AWQModifier]),
    "nvfp4_weight_only": ("NVFP4A16", []),
    "mxfp4": ("MXFP4", []),
    "mxfp8": ("MXFP8", []),
}
#: Presets that llm-compressor calibrates without data.
WITHOUT_DATA = {
    "fp8_dynamic", "fp8_block", "int8", "int8_weight_only", "int4", "nvfp4_weight_only", "mxfp4", "mxfp8",
}  # fmt: skip


def make_recipe(preset: str, group_size: int) -> list[Any]:
    """Modifiers with their defaults; only int4 groups are changed."""
    name, before = SCHEMES[preset]
    last = GPTQModifier if preset == "int4_gptq" else QuantizationModifier
    made = last(targets="Linear", scheme=name, ignore=["lm_head"])
    if name == "W4A16":
        scheme = made.resolved_config.config_groups["group_0"]
        weights = scheme.weights.model_copy(update={"group_size": group_size})
        group = scheme.model_copy(update={"weights": weights, "targets": ["Linear"]})
        made = last(config_groups={"group_0": group}, ignore=["lm_head"])
    return [*(modifier() for modifier in before), made]


def main() -> None:
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    if not torch.accelerator.is_available():
        # Its AWQ pins memory for a device, and stops where there is none. Only where data lies would be changed.
        IntermediatesCache.pin_memory = lambda *_: None
    started, cpu = time.monotonic(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    recipe = make_recipe(job["preset"], job["group_size"])
    ids = job["samples"]
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    given = {} if job["preset"] in WITHOUT_DATA else {
        "dataset": data, "num_calibration_samples": len(ids), "max_seq_length": max(map(len, ids)),
        "shuffle_calibration_samples": False,
    }  # fmt: skip
    oneshot(model=model, recipe=recipe, **given)
    model.save_pretrained(job["out"], save_compressed=True)
    seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak}) + "\n")


if __name__ == "__main__":
    main()
