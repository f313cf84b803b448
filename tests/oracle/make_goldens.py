"""Write tests/golden: tiny checkpoints and what the reference exporters make of them.

    python -m tests.oracle.make_goldens sources            transformers
    python -m tests.oracle.make_goldens modelopt           nvidia-modelopt 0.47.0 (dependency group `oracle`)
    python -m tests.oracle.make_goldens compressed-tensors compressed-tensors 0.20.1

One folder a case:

    source/                      the bf16 checkpoint as transformers saves it
    calibration.json             {"input_ids": [[...], ...]}: one batch
    modelopt-<preset>/           what `export_hf_checkpoint` writes; chosen.safetensors: what its search found
    compressed-tensors-<preset>/ tensors.safetensors: the compressor's output for every quantized linear layer;
                                 quantization_config.json; input_absmax.json, kv_absmax.json: the values given

The sources are awkward on purpose: zero rows, negative zeros, outliers, subnormal values. Tensors that equal those of
the source are left out of the files of both references.
"""

# The imports of the references are late, because no one environment needs to have all of them.
# ruff: noqa: PLC0415

import argparse
import json
import random
import warnings
from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.golden import GOLDEN

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Whole groups of 128, blocks of 128 by 128 and a part of one, o_proj wider than v_proj.
WIDE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "head_dim": 32,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _awkward_rows(model: PreTrainedModel) -> None:
    """Zero row, zero column, negative zeros, subnormal row, outliers."""
    first, second = model.model.layers
    first.self_attn.q_proj.weight[3] = 0.0
    first.self_attn.k_proj.weight[5, ::2] = -0.0
    first.self_attn.v_proj.weight[7] *= 1e-38
    first.self_attn.o_proj.weight[:, 9] = 0.0
    second.self_attn.v_proj.weight[2, 4] = 1000.0
    second.mlp.up_proj.weight[11, 13] = -300.0


def _subnormal_weight(model: PreTrainedModel) -> None:
    """A whole weight of subnormal values, and random biases."""
    second = model.model.layers[1]
    second.self_attn.k_proj.weight *= 1e-39
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.bias.normal_(std=0.1)


def _lopsided_experts(model: PreTrainedModel) -> None:
    """Gate and up of an expert, and experts among each other, differ in range; one has a zero row."""
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj[0, :64] *= 8.0
    experts.gate_up_proj[1, 64:] *= 8.0
    experts.gate_up_proj[2, 5] = 0.0
    experts.down_proj[3] *= 4.0


def _outlier_channels(model: PreTrainedModel) -> None:
    """Norms that are no ones, a few channels far from the others: what smoothing is for; and zero rows and groups."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(mean=1.0, std=0.2)
            parameter[::29] *= 12.0
    layer = model.model.layers[0]
    layer.self_attn.q_proj.weight[3] = 0.0
    layer.mlp.down_proj.weight[8:10, 128:] = 0.0
    layer.mlp.up_proj.weight[5, 7] = 40.0
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        projection.weight[0, 0] = 0.5  # the reference gives layers of one block the largest scale among them


def _zero_weights(model: PreTrainedModel) -> None:
    """Weights that are all zero: with inputs, without (the values are zero too), and beside others."""
    layer = model.model.layers[0]
    for projection in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.down_proj):
        projection.weight.zero_()


def _as_is(model: PreTrainedModel) -> None:
    pass


CASES: dict[str, tuple[PretrainedConfig, Callable[[PreTrainedModel], None]]] = {
    "llama": (LlamaConfig(**COMMON, tie_word_embeddings=False), _awkward_rows),
    "qwen2": (Qwen2Config(**COMMON, tie_word_embeddings=True), _subnormal_weight),
    "qwen3": (Qwen3Config(**COMMON, tie_word_embeddings=False), _as_is),
    "mixtral": (MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2), _lopsided_experts),
    "wide": (LlamaConfig(**COMMON | WIDE, tie_word_embeddings=True), _outlier_channels),
    "zeros": (LlamaConfig(**COMMON | SMALL, tie_word_embeddings=True), _zero_weights),
}


def make_source(case: str, config: PretrainedConfig, change: Callable[[PreTrainedModel], None]) -> None:
    """Random weights with a fixed seed, in bf16; and one calibration batch."""
    torch.manual_seed(sorted(CASES).index(case))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        change(model)
    model.save_pretrained(GOLDEN / case / "source")
    ids = torch.randint(3, config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(7))
    (GOLDEN / case / "calibration.json").write_text(json.dumps({"input_ids": ids.tolist()}) + "\n")


def make_exclude_modules() -> None:
    """The reference's wildcard shortening on random splits of names that collide in many ways."""
    from modelopt.torch.export.quant_utils import _prefix_wildcard_summarize_exclude_modules

    leaves = ("q", "q_proj", "q.a", "q.b", "mlp.gate", "mlp.gate_proj", "mlp.experts.1.w1", "mlp.experts.10.w1")
    names = ["lm_head", "lm", "model.embed_tokens", "visual.patch", "mtp.fc"]
    names += [f"model.layers.{index}.{leaf}" for index in (0, 1, 10) for leaf in leaves]
    draw = random.Random(0)
    splits = []
    for _ in range(60):
        kept = [name for name in names if draw.random() < draw.choice((0.1, 0.5, 0.9))]
        quantized = [name for name in names if name not in kept]
        expected = sorted(_prefix_wildcard_summarize_exclude_modules(kept, quantized))
        splits.append({"kept": kept, "quantized": quantized, "exclude_modules": expected})
    (GOLDEN / "exclude_modules.json").write_text(json.dumps(splits) + "\n")


def main() -> None:
    """Make one part of the golden files for all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("sources", "modelopt", "compressed-tensors"))
    part = parser.parse_args().part
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    match part:
        case "sources":
            for case, (config, change) in CASES.items():
                make_source(case, config, change)
        case "modelopt":
            from tests.oracle import golden_modelopt

            make_exclude_modules()
            golden_modelopt.make_all()
        case _:
            from tests.oracle import golden_compressed_tensors

            golden_compressed_tensors.make_all()


if __name__ == "__main__":
    main()
