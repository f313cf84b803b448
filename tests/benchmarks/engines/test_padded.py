"""The padded model computes what the model computes."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.engines.padded import make_padded_model


def test_a_padded_model_gives_the_same_logits_and_fits_blocks_of_128(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, initializer_range=0.3, rms_norm_eps=1e-2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    model.save_pretrained(tmp_path / "source")
    folder = make_padded_model(tmp_path / "source", tmp_path / "padded")
    padded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(padded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    linears = [module for module in padded.modules() if isinstance(module, torch.nn.Linear)]
    assert all(size % 128 == 0 for linear in linears[:-1] for size in linear.weight.shape)
    assert padded.config.num_attention_heads == 12 and padded.config.num_key_value_heads == 4
    assert make_padded_model(tmp_path / "none", folder) == folder
