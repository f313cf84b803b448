"""Which tensors are left out because others are the same."""

import logging

import pytest
from torch import nn

from distribute.live.ties import tied_aliases
from tests.distribute.live.stand_ins import tree

BOTH = ["embed.weight", "head.weight"]


def model(**ties: str) -> nn.Module:
    made = tree(embed=nn.Embedding(4, 2), head=nn.Linear(2, 4, bias=False))
    made.all_tied_weights_keys = {alias.replace("__", "."): canonical for alias, canonical in ties.items()}
    return made


def test_a_declared_alias_is_left_out_although_sharding_made_it_a_tensor_of_its_own() -> None:
    assert tied_aliases(model(head__weight="embed.weight"), BOTH) == {"head.weight": "embed.weight"}
    assert tied_aliases(model(), BOTH) == {}


def test_an_alias_whose_canonical_is_absent_stays() -> None:
    assert tied_aliases(model(head__weight="embed.weight"), ["head.weight"]) == {}
    assert tied_aliases(model(head__weight="embed.weight"), ["embed.weight"]) == {}


def test_one_parameter_under_two_names_is_written_under_the_first() -> None:
    shared = tree(embed=nn.Embedding(4, 2), head=nn.Linear(2, 4, bias=False))
    shared.head.weight = shared.embed.weight
    assert tied_aliases(shared, BOTH) == {"head.weight": "embed.weight"}
    shared.all_tied_weights_keys = {"embed.weight": "head.weight"}  # what is declared goes first
    assert tied_aliases(shared, BOTH) == {"embed.weight": "head.weight"}


def test_chains_lead_to_their_end_and_circles_end() -> None:
    names = ["a.weight", "b.weight", "c.weight"]
    chain = tree(a=nn.Linear(2, 2))
    chain.all_tied_weights_keys = {"a.weight": "b.weight", "b.weight": "c.weight", "c.weight": "c.weight"}
    assert tied_aliases(chain, names) == {"a.weight": "c.weight", "b.weight": "c.weight"}


def test_scales_go_with_their_weight_and_a_bias_does_not() -> None:
    names = [
        f"{module}.{leaf}"
        for module in ("embed", "head")
        for leaf in ("weight", "weight_scale", "input_scale", "bias")
    ]
    found = tied_aliases(model(head__weight="embed.weight"), names)
    assert found == {f"head.{leaf}": f"embed.{leaf}" for leaf in ("weight", "weight_scale", "input_scale")}


def test_sides_with_different_companions_are_both_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert tied_aliases(model(head__weight="embed.weight"), [*BOTH, "head.weight_scale"]) == {}
    assert "nothing for head.weight_scale" in caplog.text


def test_sides_in_different_formats_are_both_written(caplog: pytest.LogCaptureFixture) -> None:
    tied = model(head__weight="embed.weight")
    assert tied_aliases(tied, BOTH, dict.fromkeys(BOTH, "fp8")) == {"head.weight": "embed.weight"}
    with caplog.at_level(logging.WARNING):
        assert tied_aliases(tied, BOTH, {"head.weight": "fp8"}) == {}
    assert "their formats differ" in caplog.text


def test_experts_go_projection_by_projection_fused_or_unpacked() -> None:
    made = tree(a=nn.Linear(2, 2))
    made.all_tied_weights_keys = {"x.experts.gate_up_proj": "y.experts.gate_up_proj"}
    leaves = [
        "0.gate_proj.weight",
        "0.gate_proj.weight_scale",
        "0.up_proj.weight",
        "0.down_proj.weight",
        "gate.weight",
    ]
    names = [f"{side}.experts.{leaf}" for side in "xy" for leaf in leaves]
    assert tied_aliases(made, names) == {f"x.experts.{leaf}": f"y.experts.{leaf}" for leaf in leaves[:3]}
    fused = [
        f"{side}.experts.{leaf}"
        for side in "xy"
        for leaf in ("gate_up_proj", "gate_up_proj_weight_scale", "down_proj")
    ]
    assert tied_aliases(made, fused) == {one: "y" + one[1:] for one in fused[:2]}


def test_adapters_are_tied_by_the_names_of_their_base() -> None:
    made = tree(a=nn.Linear(2, 2))
    made.all_tied_weights_keys = {"head.base_layer.weight": "embed.weight"}
    assert tied_aliases(made, BOTH, is_modelopt_qlora=True) == {"head.weight": "embed.weight"}
