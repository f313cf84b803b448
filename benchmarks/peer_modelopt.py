"""One checkpoint made by nvidia-modelopt 0.47: `PYTHON peer_modelopt.py JOB.json`, as peer_llmcompressor.py."""

import copy
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

#: preset -> its configuration.
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "fp8_dynamic": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "fp8_block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    "int8": mtq.INT8_DEFAULT_CFG,
    "int8_smoothquant": mtq.INT8_SMOOTHQUANT_CFG,
    "int8_weight_only": mtq.INT8_WEIGHT_ONLY_CFG,
    "int4": mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG,
    "int4_awq": mtq.INT4_AWQ_CFG,
    "int4_gptq": mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG | {"algorithm": {"method": "gptq"}},
    "w4a8": mtq.W4A8_AWQ_BETA_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "nvfp4_awq": mtq.NVFP4_AWQ_LITE_CFG,
    "nvfp4_weight_only": mtq.W4A16_NVFP4_CFG,
    "mxfp4": mtq.MXFP4_DEFAULT_CFG,
    "mxfp8": mtq.MXFP8_DEFAULT_CFG,
}
#: Samples that go through the model together, as ours.
BATCH = 8


def make_config(preset: str, group_size: int) -> dict[str, Any]:
    """Its own configuration; only int4 groups are changed."""
    config = copy.deepcopy(CONFIGS[preset])
    for entry in config["quant_cfg"]:
        stages = entry.get("cfg") or []
        for stage in stages if isinstance(stages, list) else [stages]:
            if stage.get("num_bits") == 4 and "block_sizes" in stage:
                stage["block_sizes"] = stage["block_sizes"] | {-1: group_size}
    return config


def main() -> None:
    """Do the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    ids = torch.tensor(job["samples"])

    def run_samples(model: nn.Module) -> None:
        with torch.inference_mode():
            for batch in ids.split(BATCH):
                model(batch, use_cache=False)

    started, cpu = time.monotonic(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto").eval()
    mtq.quantize(model, make_config(job["preset"], job["group_size"]), forward_loop=run_samples)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=job["out"])
    seconds, cpu_s = time.monotonic() - started, time.process_time() - cpu
    peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_bytes": peak}) + "\n")


if __name__ == "__main__":
    main()
