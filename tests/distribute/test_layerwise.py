"""The layer-by-layer runner against a plain transformers forward: same hidden states, one layer in memory."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from distribute.errors import SourceError
from distribute.job import Progress, read_json
from distribute.layerwise import LayerwiseModel
from distribute.modules import Projection
from distribute.source import Checkpoint

KINDS = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def token_batches(vocab: int = 384) -> list[Tensor]:
    """Two batches of different shape, longer than the sliding windows used here."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, shape, generator=generator) for shape in ((2, 24), (1, 17))]


def run(folder: Path, batches: list[Tensor], **options: Any) -> list[Tensor]:
    return LayerwiseModel.open(Checkpoint.open(folder), **options).run(batches, around=ignore)


def ignore(model: nn.Module, projections: list[Projection]) -> AbstractContextManager[None]:
    return nullcontext()


def plain_forward(folder: Path, batches: list[Tensor], auto: Any = AutoModelForCausalLM) -> list[Tensor]:
    """What the last decoder layer returns in a forward of the whole model, on one thread."""
    model = auto.from_pretrained(folder, experts_implementation="eager").eval()
    outputs: list[Tensor] = []
    model.get_decoder().layers[-1].register_forward_hook(lambda _module, _args, output: outputs.append(output))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for batch in batches:
                model(input_ids=batch)
    finally:
        torch.set_num_threads(threads)
    return outputs


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain) > 0
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_equal_a_plain_forward(kind: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(kind)
    assert_same(run(folder, token_batches()), plain_forward(folder, token_batches()))


def test_layers_with_and_without_sliding_window(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2", layers=3, **SLIDING)
    windowed = run(folder, token_batches())
    assert_same(windowed, plain_forward(folder, token_batches()))
    wide = run(tiny_model("qwen2", layers=3), token_batches())
    assert not torch.equal(windowed[0], wide[0]), "the window must matter, or this test shows nothing"


def test_layers_of_mixed_rotary_frequencies(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert_same(run(tmp_path, token_batches()), plain_forward(tmp_path, token_batches()))


def test_source_dtype_is_cast_as_transformers_does(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "m")
    edit_tensors(folder, lambda tensors: tensors.update({n: t.float() * 1.001 for n, t in tensors.items()}))
    hidden = run(folder, token_batches())
    assert hidden[0].dtype == torch.bfloat16
    assert_same(hidden, plain_forward(folder, token_batches()))


def test_dtype_of_the_weights_without_one_in_the_config(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "m")
    edit_config(folder, dtype=None)
    assert_same(run(folder, token_batches()), plain_forward(folder, token_batches()))


def test_embedding_stored_as_tied_head_only(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama", tied=True), tmp_path / "m")
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_same(run(folder, token_batches()), plain_forward(folder, token_batches()))


def test_one_layer_is_in_memory_at_a_time(tiny_model: Callable[..., Path]) -> None:
    model = LayerwiseModel.open(Checkpoint.open(tiny_model("mixtral", layers=3)))
    loaded: list[set[str]] = []

    @contextmanager
    def around(whole: nn.Module, projections: list[Projection]) -> Iterator[None]:
        yield
        loaded.append({name for name, value in whole.named_parameters() if not value.is_meta})

    model.run(token_batches(), around=around)
    outside = {"model.embed_tokens.weight", "model.norm.weight"}
    for index, names in enumerate(loaded):
        inside = {name for name in names if name.startswith(f"model.layers.{index}.")}
        assert names - inside == outside
        assert len(inside) == 9, "4 attention, 2 norms, router, 2 fused expert tensors"
    assert len(loaded) == 3
    assert {name for name, value in model.model.named_parameters() if not value.is_meta} == outside


def test_a_second_run_gives_the_same(tiny_model: Callable[..., Path]) -> None:
    model = LayerwiseModel.open(Checkpoint.open(tiny_model("qwen3")))
    assert_same(model.run(token_batches(), around=ignore), model.run(token_batches(), around=ignore))


def test_without_batches_nothing_is_loaded(tiny_model: Callable[..., Path]) -> None:
    def never(whole: nn.Module, projections: list[Projection]) -> AbstractContextManager[None]:
        raise AssertionError("no layer should run")

    assert LayerwiseModel.open(Checkpoint.open(tiny_model("llama"))).run([], around=never) == []


def test_threads_are_set_and_restored(tiny_model: Callable[..., Path]) -> None:
    seen: list[int] = []

    def around(whole: nn.Module, projections: list[Projection]) -> AbstractContextManager[None]:
        seen.append(torch.get_num_threads())
        return nullcontext()

    before = torch.get_num_threads()
    LayerwiseModel.open(Checkpoint.open(tiny_model("llama")), threads=2).run(token_batches(), around=around)
    assert seen == [2, 2]
    assert torch.get_num_threads() == before


def test_progress_counts_tokens_of_every_layer(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    progress = Progress(tmp_path, 0)
    model = LayerwiseModel.open(Checkpoint.open(tiny_model("llama")))
    model.run(token_batches(), around=ignore, progress=progress)
    total = 2 * (2 * 24 + 17)
    assert read_json(tmp_path / "progress-0.json") == {
        "label": "calibrating", "done": total, "total": total, "unit": "token layers",
    }  # fmt: skip


def test_linear_modules_are_those_of_the_decoder_by_names_on_disk(tiny_model: Callable[..., Path]) -> None:
    modules = LayerwiseModel.open(Checkpoint.open(tiny_model("mixtral"))).linear_modules()
    attention = {f"self_attn.{leaf}_proj" for leaf in "qkvo"}
    experts = {f"block_sparse_moe.experts.{i}.{leaf}" for i in range(4) for leaf in ("w1", "w2", "w3")}
    assert modules == {f"model.layers.{layer}.{name}" for layer in range(2) for name in attention | experts}


def test_a_module_that_is_no_linear_layer_is_named(tiny_model: Callable[..., Path]) -> None:
    model = LayerwiseModel.open(Checkpoint.open(tiny_model("qwen3_moe")))
    with pytest.raises(SourceError, match=r"model\.layers\.0\.mlp\.gate.*ignore"):
        model.check({"model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"})


def test_vision_language_model_runs_its_language_model_only(tmp_path: Path) -> None:
    folder = make_llava(tmp_path)
    model = LayerwiseModel.open(Checkpoint.open(folder))
    assert model.layerwise
    assert all(name.startswith("language_model.model.layers.") for name in model.linear_modules())
    assert len(model.linear_modules()) == 14
    hidden = model.run(token_batches(), around=ignore)
    assert_same(hidden, plain_forward(folder, token_batches(), AutoModelForImageTextToText))
    assert all(value.is_meta for name, value in model.model.named_parameters() if "vision" in name)


def make_llava(folder: Path) -> Path:
    text = LlamaConfig(
        vocab_size=385, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.08,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=40,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=384)
    LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


CUSTOM_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast

class ScaledConfig(LlamaConfig):
    model_type = "scaled"

class ScaledModel(LlamaModel):
    config_class = ScaledConfig
    def forward(self, input_ids=None, use_cache=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        positions = self.rotary_emb(hidden, position_ids=__import__("torch").arange(input_ids.shape[1])[None])
        for layer in self.layers:
            {step}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

class ScaledForCausalLM(LlamaForCausalLM):
    config_class = ScaledConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = ScaledModel(config)
        self.post_init()
"""


def make_custom(source: Path, folder: Path, step: str) -> Path:
    """A checkpoint with its own code, whose decoder calls its layers as `step` says."""
    copy_of(source, folder)
    (folder / "scaled.py").write_text(CUSTOM_CODE.replace("{step}", step))
    auto_map = {"AutoConfig": "scaled.ScaledConfig", "AutoModelForCausalLM": "scaled.ScaledForCausalLM"}
    edit_config(folder, model_type="scaled", architectures=["ScaledForCausalLM"], auto_map=auto_map)
    return folder


@pytest.mark.parametrize(
    ("step", "layerwise"),
    [
        ("hidden = layer(hidden, position_embeddings=positions)", True),
        ("hidden = layer(hidden_states=hidden, position_embeddings=positions)", True),
        ("hidden = layer(hidden, position_embeddings=positions)[:, :]", True),
        ("hidden = layer(hidden, position_embeddings=positions) * 0.5", False),
        ("hidden = layer(hidden, position_embeddings=positions).mul_(0.5)", False),
        (
            "hidden = layer(layer(hidden, position_embeddings=positions), position_embeddings=positions)",
            False,
        ),
    ],
)
def test_what_cannot_be_taken_apart_runs_as_a_whole(
    step: str, layerwise: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_custom(tiny_model("llama"), tmp_path / f"custom_{len(step)}", step)
    model = LayerwiseModel.open(Checkpoint.open(folder), trust_remote_code=True)
    assert model.layerwise is layerwise
    assert len(model.warnings) == (0 if layerwise else 1)
    assert len(model.linear_modules()) == 14, "the head is outside in both cases"
    hidden = model.run(token_batches(), around=ignore)
    whole = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        expected = [whole.model(batch)[0] for batch in token_batches()]
        assert_same([whole.model.norm(h) for h in hidden] if layerwise else hidden, expected)


def test_custom_code_is_refused_unless_trusted(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_custom(tiny_model("llama"), tmp_path / "custom", "pass")
    with pytest.raises(SourceError, match="trust_remote_code"):
        LayerwiseModel.open(Checkpoint.open(folder))


def test_unknown_architecture_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "m")
    edit_config(folder, model_type="no_such_model")
    with pytest.raises(SourceError, match="no_such_model"):
        LayerwiseModel.open(Checkpoint.open(folder))


def test_missing_weight_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "m")
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(SourceError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        run(folder, token_batches())


def test_weight_of_another_shape_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "m")
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(SourceError, match=r"model\.layers\.0\.mlp\.up_proj\.weight .*\[127, 64\].*\[128, 64\]"):
        run(folder, token_batches())


def test_missing_expert_is_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(tiny_model("mixtral"), tmp_path / "m")
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.0.block_sparse_moe.experts.2.w2.weight"))
    with pytest.raises(SourceError, match=r"experts.*down_proj of shape \[3, 64, 128\]"):
        run(folder, token_batches())
