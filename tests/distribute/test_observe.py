"""Statistics of inputs against plain hooks, brute force over experts, and every way to deal out batches."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from distribute.errors import SourceError, StageError
from distribute.layers import QUANTIZE, decide, expert_of
from distribute.layerwise import LayerwiseModel
from distribute.observe import Observation, merge, merge_ranks, observe
from distribute.ranks import Ranks
from distribute.recipe import Recipe
from distribute.source import Checkpoint
from tests.distribute.test_layerwise import KINDS, SLIDING, make_custom, make_llava, token_batches

EXPERTS = {  # kind -> (block on disk, block in memory, leaves of gate, up and down)
    "mixtral": ("block_sparse_moe.experts", "mlp.experts", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp.experts", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def quantized_modules(folder: Path) -> set[str]:
    decisions = decide(Checkpoint.open(folder), Recipe())
    return {module for module, decision in decisions.items() if decision.action == QUANTIZE}


def observed(folder: Path, batches: list[Tensor], **options: bool) -> Observation:
    model = LayerwiseModel.open(Checkpoint.open(folder), **options)
    return observe(model, batches, quantized_modules(folder))


def plain_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)


def plain_absmax(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """absmax of every nn.Linear's input in forwards of the whole model."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def see(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            found[name] = torch.maximum(found.get(name, torch.zeros(())), args[0].float().abs().max())

        return see

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(hook(name))
    with one_thread():
        for batch in batches:
            model(input_ids=batch)
    return found


def assert_equal(first: Observation, second: Observation) -> None:
    assert first.tokens == second.tokens
    assert first.tokens_per_expert == second.tokens_per_expert
    assert first.input_absmax.keys() == second.input_absmax.keys()
    for name, value in first.input_absmax.items():
        assert torch.equal(value, second.input_absmax[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_absmax_equals_plain_hooks(kind: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(kind)
    observation = observed(folder, token_batches())
    plain = plain_absmax(plain_model(folder), token_batches())
    linears = {name for name in observation.input_absmax if expert_of(name) is None}
    assert linears == plain.keys() - {"lm_head"}
    for name in linears:
        value = observation.input_absmax[name]
        assert (value.dtype, value.shape) == (torch.float32, ())
        assert torch.equal(value, plain[name]), name


def test_absmax_with_sliding_window(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2", layers=3, **SLIDING)
    plain = plain_absmax(plain_model(folder), token_batches())
    for name, value in observed(folder, token_batches()).input_absmax.items():
        assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_equal_brute_force(kind: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(kind, experts=8)
    observation = observed(folder, token_batches())
    expected, counts = brute_force_experts(folder, kind, experts=8)
    seen = {name: value for name, value in observation.input_absmax.items() if expert_of(name)}
    assert seen.keys() == expected.keys()
    for name, value in seen.items():
        assert torch.equal(value, expected[name]), name
    assert observation.tokens_per_expert == counts
    assert all(sum(tokens) == 2 * observation.tokens for tokens in counts.values()), "two experts a token"


def brute_force_experts(folder: Path, kind: str, *, experts: int) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """absmax of the rows that each expert gets, and of act(gate) * up of them; and how many rows."""
    on_disk, in_memory, (gate, up, down) = EXPERTS[kind]
    model = plain_model(folder)
    absmax: dict[str, Tensor] = {}
    counts: dict[str, list[int]] = {}

    def hook(layer: int) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            hidden, indices, _ = args
            block = f"model.layers.{layer}.{on_disk}"
            tokens = counts.setdefault(block, [0] * experts)
            for expert in range(experts):
                rows = hidden[(indices == expert).any(dim=-1)]
                tokens[expert] += len(rows)
                if len(rows):
                    first, second = nn.functional.linear(rows, module.gate_up_proj[expert]).chunk(2, dim=-1)
                    inner = module.act_fn(first) * second
                    for leaf, value in ((gate, rows), (up, rows), (down, inner)):
                        name = f"{block}.{expert}.{leaf}"
                        absmax[name] = torch.maximum(absmax.get(name, torch.zeros(())), value.float().abs().max())

        return see

    for layer in range(2):
        model.get_submodule(f"model.layers.{layer}.{in_memory}").register_forward_pre_hook(hook(layer))
    with one_thread():
        for batch in token_batches():
            model(input_ids=batch)
    return absmax, counts


def test_expert_without_tokens_has_a_count_but_no_absmax(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    # Equal router rows tie every token; the two lowest indices win, so experts 2 and 3 get none in layer 1.
    tensors["model.layers.1.mlp.gate.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    observation = observed(folder, token_batches())
    tokens = observation.tokens_per_expert["model.layers.1.mlp.experts"]
    assert sorted(tokens) == [0, 0, 65, 65]
    dead = [index for index, count in enumerate(tokens) if count == 0]
    missing = quantized_modules(folder) - observation.input_absmax.keys()
    leaves = ("gate_proj", "up_proj", "down_proj")
    assert missing == {f"model.layers.1.mlp.experts.{index}.{leaf}" for index in dead for leaf in leaves}


def test_only_what_is_asked_for_is_measured(tiny_model: Callable[..., Path]) -> None:
    model = LayerwiseModel.open(Checkpoint.open(tiny_model("mixtral")))
    asked = {"model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.k_proj"}
    observation = observe(model, token_batches(), asked)
    assert observation.input_absmax.keys() == asked
    assert observation.tokens_per_expert == {}


def test_layers_that_share_an_input_have_one_absmax(tiny_model: Callable[..., Path]) -> None:
    absmax = observed(tiny_model("qwen3"), token_batches()).input_absmax
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        q, k, v, o = (absmax[f"{prefix}.self_attn.{leaf}_proj"] for leaf in "qkvo")
        assert q == k == v != o
        assert absmax[f"{prefix}.mlp.gate_proj"] == absmax[f"{prefix}.mlp.up_proj"]


def test_vision_language_model_is_observed_by_names_on_disk(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    observation = observed(folder, token_batches())
    assert observation.input_absmax.keys() == quantized_modules(folder)
    assert all(name.startswith("language_model.model.layers.") for name in observation.input_absmax)


def test_whole_model_is_observed_like_layers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    plain = "hidden = layer(hidden, position_embeddings=positions)"
    split = make_custom(tiny_model("llama"), tmp_path / "split", plain)
    whole = make_custom(tiny_model("llama"), tmp_path / "whole", f"{plain}.clone()")
    assert LayerwiseModel.open(Checkpoint.open(whole), trust_remote_code=True).layerwise is False
    assert_equal(
        observed(split, token_batches(), trust_remote_code=True),
        observed(whole, token_batches(), trust_remote_code=True),
    )


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_dealing_out_batches_changes_nothing(kind: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(kind)
    batches = [*token_batches(), *(batch.flip(1) for batch in token_batches())]
    together = observed(folder, batches)
    parts = [observed(folder, batches[rank::3]) for rank in range(3)]
    assert_equal(together, merge(merge(parts[0], parts[1]), parts[2]))
    assert_equal(together, merge(parts[2], merge(parts[1], parts[0])))


def test_no_batches_is_the_neutral_observation(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen3_moe")
    some, none = observed(folder, token_batches()), observed(folder, [])
    assert none.tokens == 0
    assert none.input_absmax == {}
    assert_equal(merge(some, none), some)
    assert_equal(merge(none, some), some)
    assert_equal(merge(Observation(), some), some)


def test_merge_of_ranks_alone_is_the_observation(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("qwen3_moe")
    observation = observed(folder, token_batches()[1:])
    with Ranks.start() as ranks:
        merged = merge_ranks(observation, quantized_modules(folder), ranks=ranks, workspace_path=tmp_path)
    assert merged is not None
    assert_equal(merged, observation)


def test_module_outside_the_decoder_is_refused(tiny_model: Callable[..., Path]) -> None:
    model = LayerwiseModel.open(Checkpoint.open(tiny_model("llama")))
    with pytest.raises(SourceError, match="lm_head"):
        observe(model, token_batches(), {"lm_head"})


def test_first_input_that_is_not_finite_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][3] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError, match=r"input of model\.layers\.1\.mlp\.gate_proj holds (inf|nan)"):
        observed(folder, token_batches())


def test_layer_that_never_runs_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    step = "hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), positions, None)[0]"
    folder = make_custom(tiny_model("llama"), tmp_path / "attention_only", step)
    with pytest.raises(StageError, match=r"model\.layers\.0\.mlp\.down_proj.*ignore"):
        observed(folder, token_batches(), trust_remote_code=True)
