"""Tiny models of many architectures with random weights, and what a mapping makes of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from distribute.live.names import HubTensor

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14, "depth": 2, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 16,
    "head_dim": 8, "num_key_value_heads": 4, "deepstack_visual_indexes": [1], "fullatt_block_indexes": [1], "embed_dim": 32,
}  # fmt: skip
#: Architecture -> class and config, for what its mapping does to names and rows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", TEXT),  # nothing
    "llama tied": ("LlamaForCausalLM", TEXT | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", TEXT),
    "qwen3": ("Qwen3ForCausalLM", TEXT),
    "phi3": ("Phi3ForCausalLM", TEXT),  # fused on the Hub as well
    "gpt_oss": ("GptOssForCausalLM", TEXT | EXPERTS),  # stacked on the Hub as well
    "llama4_text": ("Llama4ForCausalLM", TEXT | EXPERTS | {"intermediate_size_mlp": 48}),
    "gemma3_text": ("Gemma3ForCausalLM", TEXT),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),  # a mapping by class name
    "qwen3_moe": ("Qwen3MoeForCausalLM", TEXT | EXPERTS),  # experts split, gate and up split
    "qwen2_moe": ("Qwen2MoeForCausalLM", TEXT | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "mixtral": ("MixtralForCausalLM", TEXT | EXPERTS),  # and renamed
    "phimoe": ("PhimoeForCausalLM", TEXT | EXPERTS),  # and the router renamed
    "olmoe": ("OlmoeForCausalLM", TEXT | EXPERTS),
    "minimax": ("MiniMaxForCausalLM", TEXT | EXPERTS),
    "jamba": ("JambaForCausalLM", TEXT | EXPERTS | {"num_hidden_layers": 8, "mamba_d_state": 4}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", TEXT | EXPERTS | {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1}),
    "granitemoe": ("GraniteMoeForCausalLM", TEXT | EXPERTS),  # stacked on the Hub, under other names
    "deepseek_v3": ("DeepseekV3ForCausalLM", TEXT | EXPERTS | MLA),
    "glm4_moe": ("Glm4MoeForCausalLM", TEXT | EXPERTS | MLA | {"num_key_value_heads": 2}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {"text_config": TEXT | EXPERTS, "vision_config": VISION}),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", {"text_config": TEXT, "vision_config": VISION}),
    "gemma3": ("Gemma3ForConditionalGeneration", {"text_config": TEXT, "vision_config": VISION}),  # prefixes by class
    "llava": ("LlavaForConditionalGeneration", {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"}}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", TEXT | {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
    "inkling2_text": ("Inkling2ForCausalLM", TEXT | EXPERTS),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", {  # q, k, v joined and permuted; paired renamings
        "text_config": TEXT | EXPERTS | MLA | {"model_type": "deepseek_v3"}, "vision_config": VISION}),
    "molmo2": ("Molmo2ForConditionalGeneration", {  # q, k, v of different heights joined
        "text_config": TEXT, "vision_config": VISION | {"image_size": [28, 28]},
        "adapter_config": VISION | {"text_hidden_size": 32, "vision_feature_layer": [0, 1]}}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", TEXT | EXPERTS | MLA),
    "nemotron_h": ("NemotronHForCausalLM", TEXT | EXPERTS),
    "nomic_bert": ("NomicBertModel", TEXT),
    "dinov2": ("Dinov2Model", VISION),
}  # fmt: skip


def make(kind: str, seed: int = 0) -> PreTrainedModel:
    """A model that was not loaded, every tensor of its state filled with other numbers."""
    name, values = MODELS[kind]
    cls = getattr(transformers, name)
    torch.manual_seed(seed)
    model: PreTrainedModel = cls(cls.config_class(**values)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape))
    return model


def stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """The part of a model's state that a checkpoint holds, by name in memory."""
    left_out = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}


def saved(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """What `save_pretrained` writes."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def assemble(hub: Iterable[HubTensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the Hub, made of the flat rows that the mapping names."""
    made = {}
    for tensor in hub:
        pieces = []
        for part in tensor.parts:
            source = state[part.source]
            rows = source.reshape(-1, source.shape[-1] if source.dim() > 1 else 1)
            assert 0 <= part.start <= part.stop <= len(rows)
            pieces.append(rows[part.start : part.stop].flatten())
        made[tensor.name] = torch.cat(pieces).reshape(tensor.shape)
    return made


def assert_same(made: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Same names, and under each the same dtype, shape and bytes."""
    assert sorted(made) == sorted(expected)
    for name, tensor in expected.items():
        assert made[name].dtype == tensor.dtype, name
        assert made[name].shape == tensor.shape, name
        assert torch.equal(made[name], tensor), name
