"""Scales follow the rows of their weight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Split, WeightConverter

from distribute.errors import UserError
from distribute.live.companions import is_companion, weight_of
from distribute.live.names import hub_tensors
from tests.distribute.live.hub_models import assemble, shapes_of

SPLIT = WeightConverter(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight", [Concatenate(0)])
JOIN = WeightConverter("qkv.weight", ["q.weight", "k.weight", "v.weight"], [Chunk(0)])
STACKED = WeightConverter(
    ["experts.*.w1.weight", "experts.*.w3.weight"], "experts.gate_up_proj", [MergeModulelist(0), Concatenate(1)]
)


def mapped(transform: WeightConverter, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = nn.Module()
    model._weight_conversions = [transform]  # type: ignore[assignment]
    return assemble(hub_tensors(model, shapes_of(state)), state)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


@given(half=st.integers(1, 6), block=st.integers(1, 4), groups=st.integers(1, 3), kind=st.integers(0, 3))
def test_scales_of_rows_and_of_blocks_of_rows_are_split_with_them(
    half: int, block: int, groups: int, kind: int
) -> None:
    blocks = 2 * half
    rows = blocks * block
    scale = [numbers(rows), numbers(rows, groups), numbers(rows, 1), numbers(blocks, 1, groups, 1)][kind]
    state = {"gate_up_proj.weight": numbers(rows, 5), "gate_up_proj.weight_scale": scale}
    made = mapped(SPLIT, state)
    for leaf in ("weight", "weight_scale"):
        gate, up = state[f"gate_up_proj.{leaf}"].chunk(2)
        assert torch.equal(made[f"gate_proj.{leaf}"], gate)
        assert torch.equal(made[f"up_proj.{leaf}"], up)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"])
def test_what_all_rows_share_goes_to_every_part(leaf: str, shape: tuple[int, ...]) -> None:
    check_shared(leaf, numbers(*shape) + 7)


@pytest.mark.parametrize(("leaf", "shape"), [("pre_quant_scale", (8,)), ("svdquant_lora_a", (2, 8))])
def test_what_belongs_to_the_input_goes_to_every_part(leaf: str, shape: tuple[int, ...]) -> None:
    check_shared(leaf, numbers(*shape))  # as many columns as there are rows


def check_shared(leaf: str, value: torch.Tensor) -> None:
    made = mapped(SPLIT, {"gate_up_proj.weight": numbers(8, 8), f"gate_up_proj.{leaf}": value})
    for part in ("gate_proj", "up_proj"):
        assert made[f"{part}.{leaf}"].shape == value.shape
        assert torch.equal(made[f"{part}.{leaf}"], value)


@pytest.mark.parametrize(
    ("shape", "gate"),
    [((), ()), ((3,), ()), ((3, 1, 1), (1, 1)), ((3, 8, 2), (4, 2)), ((3, 2, 1), (1, 1))],
    ids=str,
)
def test_scales_of_stacked_experts_go_to_their_expert(shape: tuple[int, ...], gate: tuple[int, ...]) -> None:
    scale = numbers(*shape)
    made = mapped(STACKED, {"experts.gate_up_proj": numbers(3, 8, 4), "experts.gate_up_proj_weight_scale": scale})
    found = made["experts.2.w3.weight_scale"]
    assert found.shape == gate
    expected = scale if not shape else scale[2]
    if len(shape) == 3 and shape[1] > 1:
        expected = expected.chunk(2)[1]
    assert torch.equal(found, expected.reshape(gate))


def test_input_scales_of_stacked_experts_are_per_expert_or_shared() -> None:
    state = {"experts.gate_up_proj": numbers(3, 8, 4), "experts.gate_up_proj_input_scale": numbers(3)}
    assert mapped(STACKED, state)["experts.1.w1.input_scale"] == 1
    state["experts.gate_up_proj_input_scale"] = torch.tensor(5.0)
    assert mapped(STACKED, state)["experts.1.w1.input_scale"] == 5


def test_scales_of_rows_are_joined_with_them() -> None:
    state = {f"{name}.weight": numbers(4, 3) for name in "qkv"} | {
        f"{name}.weight_scale": numbers(4) for name in "qkv"
    }
    assert torch.equal(mapped(JOIN, state)["qkv.weight_scale"], numbers(4).repeat(3))


@pytest.mark.parametrize(
    ("transform", "state", "match"),
    [
        (JOIN, {"q.weight_scale": (), "k.weight_scale": (), "v.weight_scale": ()}, "q.weight_scale of shape .* divided or joined"),
        (JOIN, {"q.weight_scale": (4,), "k.weight_scale": (4,)}, "qkv.weight_scale .* none for v.weight"),
        (SPLIT, {"gate_up_proj.weight_scale": (3,)}, r"of shape \[3\] cannot be divided"),
        (STACKED, {"experts.gate_up_proj_weight_scale": (3, 8)}, "cannot be divided"),
        (STACKED, {"experts.gate_up_proj_weight_scale": (2,)}, "cannot be divided"),
    ],
)  # fmt: skip
def test_a_scale_that_cannot_follow_its_weight_is_refused(
    transform: WeightConverter, state: dict[str, tuple[int, ...]], match: str
) -> None:
    weights = {f"{name}.weight": (4, 3) for name in "qkv"} | {
        "gate_up_proj.weight": (8, 3),
        "experts.gate_up_proj": (3, 8, 4),
    }
    model = nn.Module()
    model._weight_conversions = [transform]  # type: ignore[assignment]
    with pytest.raises(UserError, match=f"{match}.*leave these modules out"):
        hub_tensors(model, weights | state)


def test_scales_of_keys_and_values_are_renamed_and_never_joined() -> None:
    transform = WeightConverter("attn.qkv", ["attn.q_proj", "attn.k_proj", "attn.v_proj"], [Split(0)])
    state = {f"attn.{name}_proj.weight": numbers(2, 3) for name in "qkv"} | {"attn.k_proj.k_scale": torch.tensor(2.0)}
    made = mapped(transform, state)
    assert sorted(made) == ["attn.k_proj.k_scale", "attn.qkv.weight"]


def test_companions_are_known_by_leaf_and_by_a_weight_beside_them() -> None:
    weights = {"a.weight", "experts.down_proj"}
    assert weight_of("a.weight_scale_2", weights) == ("a.weight", "weight_scale_2")
    assert weight_of("experts.down_proj_input_scale", weights) == ("experts.down_proj", "input_scale")
    assert weight_of("b.weight_scale", weights) is None
    assert weight_of("a.weight", weights) is None
    assert weight_of("a.bias", weights) is None
    assert is_companion("b.weight_scale")
    assert not is_companion("b.scale")
