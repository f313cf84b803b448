"""Ranges of keys and values against modelopt's own quantizers and against what a cache holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, Gemma3TextConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from distribute.errors import StageError
from distribute.layerwise import LayerwiseModel
from distribute.observe import Observation, merge, merge_ranks, observe
from distribute.ranks import Ranks
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from tests.distribute.test_layerwise import make_custom, make_llava, token_batches
from tests.distribute.test_observe import assert_equal, one_thread, plain_model, quantized_modules

SMALL: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.08, "sliding_window": 8,
}  # fmt: skip
#: Attention of different kinds: "eager" alone (softcap), two rotations, norms on keys, routed experts around it.
KINDS = ("llama", "qwen3", "mixtral", "gemma2", "gemma3")


def make(kind: str, tiny_model: Callable[..., Path], folder: Path) -> Path:
    if kind not in ("gemma2", "gemma3"):
        return tiny_model(kind)
    config = Gemma2Config(**SMALL) if kind == "gemma2" else Gemma3TextConfig(**SMALL)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def cached_absmax(model: PreTrainedModel, batches: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Largest key and value of every layer's cache."""
    found = [(torch.zeros(()), torch.zeros(()))] * model.config.num_hidden_layers
    with one_thread():
        for batch in batches:
            cache = DynamicCache()  # without the config, so that sliding layers keep all
            model(input_ids=batch, past_key_values=cache, use_cache=True)
            pairs = [(layer.keys.abs().max().float(), layer.values.abs().max().float()) for layer in cache.layers]
            found = [tuple(map(torch.maximum, a, b)) for a, b in zip(found, pairs, strict=True)]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_are_those_of_a_cache(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(kind, tiny_model, tmp_path)
    tables = dict(ALL_ATTENTION_FUNCTIONS)
    observation = observe(LayerwiseModel.open(Checkpoint.open(folder)), token_batches(), (), kv=True)
    assert dict(ALL_ATTENTION_FUNCTIONS) == tables, "what was wrapped is put back"
    expected = cached_absmax(plain_model(folder), token_batches())
    assert list(observation.kv_absmax) == [f"model.layers.{index}.self_attn" for index in range(len(expected))]
    for pair, cached in zip(observation.kv_absmax.values(), expected, strict=True):
        assert [value.dtype for value in pair] == [torch.float32, torch.float32]
        assert pair == cached


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_ranges_are_those_of_modelopt(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make(kind, tiny_model, tmp_path)
    model = plain_model(folder)

    def forward(model: PreTrainedModel) -> None:
        with one_thread():
            for batch in token_batches():
                model(input_ids=batch, use_cache=False)

    rules = [{"quantizer_name": "*", "enable": False}]
    rules += [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}, "enable": True}]
    mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, forward)
    observation = observe(LayerwiseModel.open(Checkpoint.open(folder)), token_batches(), (), kv=True)
    assert len(observation.kv_absmax) == 2
    for name, (keys, values) in observation.kv_absmax.items():
        attention = model.get_submodule(name)
        assert (keys, values) == (attention.k_bmm_quantizer.amax.float(), attention.v_bmm_quantizer.amax.float())


def test_batches_may_be_dealt_out_and_are_merged_alone(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder, batches = tiny_model("qwen3_moe"), token_batches()
    modules = quantized_modules(folder)

    def observed(batches: list[Tensor]) -> Observation:
        return observe(LayerwiseModel.open(Checkpoint.open(folder)), batches, modules, channels=True, kv=True)

    together, parts = observed(batches), [observed([batch]) for batch in batches]
    both = merge(parts[1], parts[0])
    assert_equal(together, both)
    assert together.kv_absmax == both.kv_absmax
    assert together.channel_absmax.keys() == both.channel_absmax.keys() == together.input_absmax.keys()
    assert all(torch.equal(value, both.channel_absmax[name]) for name, value in together.channel_absmax.items())
    with Ranks.start() as ranks:
        merged = merge_ranks(together, modules, ranks=ranks, workspace_path=tmp_path)
    assert merged is not None
    assert merged.kv_absmax == together.kv_absmax
    assert merged.channel_absmax.keys() == together.channel_absmax.keys()
    Statistics({}, together.input_absmax, {}, together.channel_absmax, together.kv_absmax).write(tmp_path)
    read = Statistics.read(tmp_path)
    assert read.kv_absmax == together.kv_absmax
    assert all(torch.equal(value, read.channel_absmax[name]) for name, value in together.channel_absmax.items())


def test_channels_are_those_of_plain_hooks(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    name = "model.layers.1.mlp.down_proj"
    observation = observe(LayerwiseModel.open(Checkpoint.open(folder)), token_batches(), [name], channels=True)
    plain = observe(LayerwiseModel.open(Checkpoint.open(folder)), token_batches(), [name])
    inputs: list[Tensor] = []
    model = plain_model(folder)
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    with one_thread():
        for batch in token_batches():
            model(input_ids=batch)
    assert torch.equal(observation.channel_absmax[name], torch.cat(inputs).float().abs().amax(0))
    assert observation.input_absmax == plain.input_absmax
    assert plain.channel_absmax == {}


def test_vision_language_model_by_names_on_disk(tmp_path: Path) -> None:
    model = LayerwiseModel.open(Checkpoint.open(make_llava(tmp_path)))
    observation = observe(model, token_batches(), (), kv=True)
    assert next(iter(observation.kv_absmax)) == "language_model.model.layers.0.self_attn"


def test_attention_without_the_interface_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    step = "hidden = hidden + layer.mlp(layer.input_layernorm(hidden))"
    folder = make_custom(tiny_model("llama"), tmp_path / "custom", step)
    model = LayerwiseModel.open(Checkpoint.open(folder), trust_remote_code=True)
    with pytest.raises(StageError, match=r"model\.layers\.0\.self_attn.*kv_cache"):
        observe(model, token_batches(), (), kv=True)
