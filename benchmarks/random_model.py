"""A Llama-shaped checkpoint of random bf16 weights of any size, written layer by layer (memory: one layer)."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 8192, 16, 4, 128, 32_000


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one decoder layer (about 120 MB in bf16)."""
    prefix = f"model.layers.{layer}"
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": (MLP, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (MLP, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, MLP),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def make_random_model(folder: Path, *, layers: int) -> Path:
    """Write a model of `layers` layers, one file a layer, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    outside: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    parts = [outside, *(layer_shapes(layer) for layer in range(layers))]
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {
            key: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for key, shape in shapes.items()
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    return folder


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
