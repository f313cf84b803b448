"""Write tests/golden: tiny checkpoints and what the reference exporters make of them.

    python tests/oracle/make_goldens.py sources            transformers
    python tests/oracle/make_goldens.py modelopt           nvidia-modelopt 0.47.0 (dependency group `oracle`)
    python tests/oracle/make_goldens.py compressed-tensors compressed-tensors 0.20.1

One folder a case:

    source/                      the bf16 checkpoint as transformers saves it
    calibration.json             {"input_ids": [[...], ...]}: one batch
    modelopt-<preset>/           what `export_hf_checkpoint` writes
    compressed-tensors-<preset>/ tensors.safetensors: the compressor's output for every quantized linear layer;
                                 quantization_config.json; input_absmax.json: the values given for static inputs

The sources are awkward on purpose: zero rows, negative zeros, outliers, subnormal values.
"""

# The imports of the references are late, because no one environment needs to have all of them.
# ruff: noqa: PLC0415

import argparse
import json
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

GOLDEN = Path(__file__).parent.parent / "golden"
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
MODELOPT_PRESETS = {"fp8": "FP8_DEFAULT_CFG", "fp8_dynamic": "FP8_PER_CHANNEL_PER_TOKEN_CFG"}
CT_PRESETS = {"fp8": "FP8", "fp8_dynamic": "FP8_DYNAMIC"}


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


def _as_is(model: PreTrainedModel) -> None:
    pass


CASES: dict[str, tuple[PretrainedConfig, Callable[[PreTrainedModel], None]]] = {
    "llama": (LlamaConfig(**COMMON, tie_word_embeddings=False), _awkward_rows),
    "qwen2": (Qwen2Config(**COMMON, tie_word_embeddings=True), _subnormal_weight),
    "qwen3": (Qwen3Config(**COMMON, tie_word_embeddings=False), _as_is),
    "mixtral": (MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2), _lopsided_experts),
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


def make_modelopt(case: str, preset: str, config_name: str) -> None:
    """Max calibration on the one batch, then the single-process export."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = AutoModelForCausalLM.from_pretrained(GOLDEN / case / "source", dtype="auto").eval()
    ids = torch.tensor(json.loads((GOLDEN / case / "calibration.json").read_text())["input_ids"])
    mtq.quantize(model, getattr(mtq, config_name), forward_loop=lambda model: model(ids))
    folder = _empty(GOLDEN / case / f"modelopt-{preset}")
    export_hf_checkpoint(model, export_dir=folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # transformers' defaults, not the exporter's work


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


def make_compressed_tensors(case: str, preset: str, preset_name: str) -> None:
    """The compressor, module by module; static input scales from given values."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset_name, ["Linear"])
    scheme.format = "float-quantized"
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    weights = load_file(GOLDEN / case / "source" / "model.safetensors")
    modules = [
        name.removesuffix(".weight")
        for name in sorted(weights)
        if name.endswith("_proj.weight") or ".experts." in name
    ]
    static = scheme.input_activations is not None and not scheme.input_activations.dynamic
    given = {module: 0.37 * index for index, module in enumerate(modules)} if static else {}
    out: dict[str, torch.Tensor] = {}
    for module in modules:
        state = _with_qparams(weights[f"{module}.weight"], scheme, given.get(module))
        out |= {f"{module}.{suffix}": tensor for suffix, tensor in compressor.compress(state, scheme).items()}
    folder = _empty(GOLDEN / case / f"compressed-tensors-{preset}")
    save_file(out, folder / "tensors.safetensors")
    config = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(**scheme.model_dump())},
        format="float-quantized",
        quantization_status="compressed",
        ignore=_ignored_by_reference(case, scheme),
    )
    _write_json(folder / "quantization_config.json", config.model_dump(mode="json"))
    if given:
        _write_json(folder / "input_absmax.json", given)


def _with_qparams(weight: torch.Tensor, scheme: Any, input_absmax: float | None) -> dict[str, torch.Tensor]:
    """A module's state before compression: scales and (zero) zero points, as CT's own initialization has them."""
    from compressed_tensors.quantization.utils import calculate_qparams

    dims = {"dim": 1, "keepdim": True} if scheme.weights.strategy == "channel" else {}
    low, high = torch.amin(weight, **dims), torch.amax(weight, **dims)
    scale, zero_point = calculate_qparams(low, high, scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    if input_absmax is not None:
        absmax = torch.tensor(input_absmax, dtype=weight.dtype)
        scale, zero_point = calculate_qparams(-absmax, absmax, scheme.input_activations)
        state |= {"input_scale": scale, "input_zero_point": zero_point}
    return state


def _ignored_by_reference(case: str, scheme: Any) -> list[str]:
    """The names CT lists as ignored when every linear layer but the head carries the scheme."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    model = AutoModelForCausalLM.from_pretrained(GOLDEN / case / "source", dtype="auto")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.quantization_scheme = scheme
            module.quantization_status = QuantizationStatus.COMPRESSED
    found = QuantizationConfig.from_pretrained(model, format="float-quantized")
    assert found is not None and found.ignore is not None
    return found.ignore


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    """Make one part of the golden files for all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("sources", "modelopt", "compressed-tensors"))
    part = parser.parse_args().part
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if part == "modelopt":
        make_exclude_modules()
    for case, (config, change) in CASES.items():
        if part == "sources":
            make_source(case, config, change)
        for preset, name in (MODELOPT_PRESETS if part == "modelopt" else {}).items():
            make_modelopt(case, preset, name)
        for preset, name in (CT_PRESETS if part == "compressed-tensors" else {}).items():
            make_compressed_tensors(case, preset, name)


if __name__ == "__main__":
    main()
