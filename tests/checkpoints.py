"""Hand-made checkpoints for tests that need no model: the names and shapes of a small decoder, any tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8,
    "vocab_size": 16, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
}  # fmt: skip


def decoder_tensors(num_layers: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """bf16 tensors of a Llama-like decoder with an untied head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in LINEARS.items()}
        shapes |= {f"{prefix}.input_layernorm.weight": (8,), f"{prefix}.post_attention_layernorm.weight": (8,)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], *, files: int = 1, metadata: bool = True, **config: Any
) -> Path:
    """Write tensors, spread over `files` files with an index, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    header = {"format": "pt"} if metadata else None
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata=header)
        return folder
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(tensors.items())[number::files])
        save_file(part, folder / name, metadata=header)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, str], **fields: Any) -> None:
    """Write an index with just the given fields."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, **fields}))
