"""The mapping, operation by operation: rows as the library moves weights, and a refusal where rows are torn."""

import pytest
import torch
from torch import nn
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

from distribute.errors import UserError
from distribute.live.conversion import Conversion, HubTensor, Part
from tests.distribute.live.hub_models import assemble, assert_same, make, shapes_of, stored

Q, K, V = (f"self_attn.{name}_proj.weight" for name in "qkv")


def converter(hub: str | list[str], memory: str | list[str], *operations: object) -> WeightConverter:
    return WeightConverter(hub, memory, list(operations))


BY_ROWS = {
    "joined again": converter("attn.qkv.weight", [Q, K, V], Split(0)),
    "joined after a permutation": converter(
        "attn.qkv.weight", [Q, K, V], Chunk(0), PermuteForRope(permute_layer_names=["q_proj"])
    ),
    "split": converter(["attn.a.weight", "attn.b.weight"], Q, Concatenate(0)),
    "permuted": converter("attn.q.weight", Q, PermuteForRope()),
    "interleaved": converter("mlp.up.weight", "mlp.up_proj.weight", Interleave(0)),
    "interleaved and split": converter("mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], Interleave(0), Chunk(0)),
    "renamed": WeightRenaming("attention.", "self_attn."),
    "transposed if need be": converter(Q, Q, Transpose(0, 1, check_dims=True)),
}  # fmt: skip
TORN = {
    "transposed": converter("attn.q.weight", Q, Transpose(0, 1)),
    "split by columns": converter(["attn.a.weight", "attn.b.weight"], Q, Concatenate(1)),
    "joined by columns": converter("attn.qkv.weight", [Q, K, V], Chunk(1)),
    "columns interleaved": converter("attn.q.weight", Q, Interleave(1)),
}


@pytest.mark.parametrize("transform", BY_ROWS.values(), ids=BY_ROWS)
def test_rows_move_as_the_library_moves_weights(transform: WeightConverter) -> None:
    model = make("llama")
    model._weight_conversions = [transform]
    state = stored(model)
    expected = revert_weight_conversion(model, state)
    assert_same(assemble(Conversion(model).revert(shapes_of(state)), state), expected)


@pytest.mark.parametrize("transform", TORN.values(), ids=TORN)
def test_a_tensor_that_is_not_whole_rows_is_refused_by_name(transform: WeightConverter) -> None:
    model = make("llama")
    model._weight_conversions = [transform]
    shapes = {name: shape for name, shape in shapes_of(stored(model)).items() if len(shape) == 2}
    shapes = {name: (32, 32) if "self_attn" in name else shape for name, shape in shapes.items()}
    with pytest.raises(UserError, match=r"model\.layers\.\d\.attn\.\w+\.weight, as the Hub .*save_pretrained"):
        Conversion(model).revert(shapes)


def test_stacked_experts_are_split_and_their_halves_too() -> None:
    model = nn.Module()
    model._weight_conversions = [  # type: ignore[assignment]
        converter(
            [".experts.*.w1.weight", ".experts.*.w3.weight"],
            ".experts.gate_up_proj",
            MergeModulelist(0),
            Concatenate(1),
        )
    ]
    state = {"mlp.experts.gate_up_proj": torch.arange(2 * 6 * 5.0).reshape(2, 6, 5)}
    made = assemble(Conversion(model).revert(shapes_of(state)), state)
    assert sorted(made) == [f"mlp.experts.{expert}.{leaf}.weight" for expert in (0, 1) for leaf in ("w1", "w3")]
    assert torch.equal(made["mlp.experts.1.w3.weight"], state["mlp.experts.gate_up_proj"][1, 3:])


def test_a_mapping_that_would_lose_rows_is_refused() -> None:
    class First(Concatenate):
        reverse_op = property(lambda self: FirstChunk(self.dim))  # type: ignore[assignment]

    class FirstChunk(Chunk):
        def convert(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
            return dict([*super().convert(*args, **kwargs).items()][:1])  # type: ignore[arg-type]

    model = nn.Module()
    model._weight_conversions = [converter(["a", "b"], "joined", First(0))]  # type: ignore[assignment]
    with pytest.raises(UserError, match="of 8 rows of joined, transformers puts 4 on the Hub"):
        Conversion(model).revert({"joined": (8, 3)})


def test_an_operation_that_fails_is_a_refusal_with_the_names() -> None:
    model = nn.Module()
    model._weight_conversions = [converter("attn.qkv", ["q", "k"], Chunk(0))]  # type: ignore[assignment]
    with pytest.raises(UserError, match="transformers cannot convert k, q back"):
        Conversion(model).revert({"q": (4, 3), "k": (4, 2)})


def test_a_model_that_was_converted_for_its_quantization_is_refused() -> None:
    model = nn.Module()
    transform = converter(["a", "b"], "joined", Concatenate(0))
    transform.quantization_operation = Chunk(0)
    model._weight_conversions = [transform]  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"cannot undo .*; load the model without a quantization config"):
        Conversion(model)


def test_a_stand_in_is_narrow() -> None:
    """Names of a model of any size cost memory for its rows only."""
    model = nn.Module()
    model._weight_conversions = [converter(["a", "b"], "joined", Concatenate(0))]  # type: ignore[assignment]
    (first, second) = Conversion(model).revert({"joined": (1000, 10**12)})
    assert first.shape == second.shape == (500, 10**12)


def test_a_model_that_transformers_does_not_know_keeps_its_names() -> None:
    (tensor,) = Conversion(nn.Linear(3, 2, bias=False)).revert({"weight": (2, 3)})
    assert tensor == HubTensor("weight", (2, 3), (Part("weight", 0, 2),))


def test_the_model_s_own_mapping_is_not_changed() -> None:
    model = make("mixtral")
    model._weight_conversions = [converter("attn.qkv.weight", [Q, K, V], Split(0))]
    before = [repr(entry) for entry in model._weight_conversions]
    Conversion(model).revert(shapes_of(stored(model)))
    assert [repr(entry) for entry in model._weight_conversions] == before
    assert not any(entry.was_used() or entry.collected_tensors for entry in model._weight_conversions)
