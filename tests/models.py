"""Tiny random models with a real tokenizer, saved by transformers as bf16 safetensors checkpoints.

The same arguments give the same bytes. Nothing is downloaded. Architectures are chosen for what they do to names
and shapes: untied or tied head, q/k norms, biases, routed experts.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

KINDS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,  # untied head
    "qwen2": Qwen2Config,  # biases on q, k, v
    "qwen3": Qwen3Config,  # q/k norms
    "mixtral": MixtralConfig,  # block_sparse_moe.experts.N.w1 on disk
    "qwen3_moe": Qwen3MoeConfig,  # mlp.experts.N.gate_proj on disk
}
SENTENCES = [
    "The library opens at nine in the morning and closes when the last reader has gone home.",
    "A river does not ask the stones for permission; it goes around them, year after year.",
    "She counted the boats in the harbour, wrote the number down, and counted them again.",
    "In the winter of that year the bread was dark, the streets were white, and the talk was short.",
    "Good tools are quiet: they do one thing, they do it well, and they say so when they cannot.",
    "We measured the table twice, and twice the answer was the same, so we cut the wood.",
]
END = "<|end|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def make_model(
    kind: str,
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 384,
    experts: int = 4,
    positions: int = 256,
    tied: bool = False,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Save a model of one of `KINDS` and its tokenizer into `folder` and return it.

    Heads are 4 of which 2 are for keys and values, head size hidden / 4, MLP size 2 * hidden, 2 experts a token.
    `config` overrides any field of the transformers config.
    """
    values = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
        "max_position_embeddings": positions, "tie_word_embeddings": tied, "initializer_range": 0.08,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    if kind == "mixtral":
        values |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        values |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(KINDS[kind](**(values | config)), dtype=torch.bfloat16)
        _randomize_vectors(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(min(vocab, 384)).save_pretrained(folder)
    return folder


def make_tokenizer(vocab: int = 384) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab` tokens (at least 257) with an end token and no pad token."""
    assert vocab >= 257, "a byte-level vocabulary needs 256 bytes and the end token"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def _randomize_vectors(model: PreTrainedModel) -> None:
    """In place: norms and biases, which start as ones and zeros, get values that a test can tell apart."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
