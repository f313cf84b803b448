"""Absmax values of quantizers, against the scales that nvidia-modelopt 0.47 wrote and by hand."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from distribute.errors import UserError
from distribute.live.encode import FORMATS
from distribute.live.quantizers import Quantized, read_quantized, share_amax
from distribute.live.state import clean_state
from tests.distribute.live.stand_ins import (
    CASES,
    FP8,
    FP8_PER_ROW,
    NVFP4,
    FusedExperts,
    Quantizer,
    from_golden,
    linear,
    place,
    read_case,
    tree,
)

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def read(model: nn.Module, *, qlora: bool = False) -> dict[str, Quantized]:
    """As the export does: the names of the clean state, then the quantizers, then what they share."""
    sources = clean_state(model.state_dict(), 448, "FP8", qlora).sources
    return share_amax(read_quantized(model, sources, qlora), {})


def outputs(weight: Quantized) -> dict[str, tuple[int, int]]:
    """Module in the checkpoint -> flat rows of the weight."""
    if weight.weight.endswith(".weight"):
        return {weight.weight.removesuffix(".weight"): (0, weight.rows)}
    block, _, leaf = weight.weight.rpartition(".")
    size = weight.rows // len(PARTS[leaf])
    spans = enumerate((place, part) for place in range(len(weight.weight_amax)) for part in PARTS[leaf])
    return {f"{block}.{place}.{part}": (at * size, (at + 1) * size) for at, (place, part) in spans}


@pytest.mark.parametrize("case", CASES)
def test_scales_equal_the_reference_bit_for_bit(case: str) -> None:
    golden = read_case(case)
    found: dict[str, Any] = {}
    for weight in read(from_golden(golden)).values():
        assert not weight.unmeasured
        form = FORMATS[weight.format]
        for module, rows in outputs(weight).items():
            for suffix, scale in form.scales(weight.absmax_of_rows(*rows), torch.bfloat16).items():
                found[f"{module}.{suffix}"] = scale.tolist()
            if form.input_scale is not None and weight.input_amax is not None:
                found[f"{module}.input_scale"] = form.input_scale(weight.input_amax, torch.bfloat16).item()
    assert found == {
        name: value for name, value in golden["scales"].items() if not name.endswith(("k_scale", "v_scale"))
    }


def test_disabled_and_absent_quantizers_leave_a_weight_alone() -> None:
    plain = nn.Linear(32, 32)
    plain.input_quantizer = Quantizer((4, 3), 1.0)
    assert read(tree(a=linear(32, 32, FP8, is_enabled=False), b=plain, c=nn.Linear(4, 4))) == {}


def test_packed_weights_are_not_coded_again_but_need_their_scales() -> None:
    layer = linear(32, 32, FP8, inputs=FP8)
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UserError, match=r"proj\.weight is compressed, but proj\.weight_scale is not"):
        read(tree(proj=layer))
    layer.register_buffer("weight_scale", torch.ones(()))
    assert read(tree(proj=layer)) == {}


@pytest.mark.parametrize(
    ("weight", "inputs", "name"),
    [
        (
            {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
            FP8,
            "w4a8_mxfp4_fp8",
        ),
        (NVFP4, FP8, "w4a8_nvfp4_fp8"),
        ({"num_bits": 8, "axis": 0}, None, "int8_wo"),
        ({"num_bits": 4, "block_sizes": {-1: 128}}, None, "int4_awq"),
        ({"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}}, None, "fp8_pb_wo"),
    ],
)
def test_formats_that_cannot_be_coded_are_refused_by_name(weight: Any, inputs: Any, name: str) -> None:
    with pytest.raises(
        UserError, match=rf"a\.proj\.weight is quantized as {name}, .*fp8, fp8_pc_pt, nvfp4, w4a16_nvfp4"
    ):
        read(tree(a__proj=linear(128, 128, weight, inputs=inputs)))


def test_two_stages_are_refused() -> None:
    layer = linear(32, 128, FP8)
    layer.weight_quantizer = nn.Sequential(Quantizer(4, block_sizes={-1: 128}), Quantizer((4, 3), 1.0))
    with pytest.raises(UserError, match=r"quantized as w4a8_awq"):
        read(tree(proj=layer))


def test_static_blocks_are_refused_by_name() -> None:
    layer = linear(32, 32, {**NVFP4, "block_sizes": {-1: 16, "scale_bits": (4, 3)}}, torch.ones(64, 1))
    with pytest.raises(UserError, match=r"proj\.weight has shape \[64, 1\]"):
        read(tree(proj=layer))
    layer.weight_quantizer.register_buffer("_global_amax", torch.ones(()))
    with pytest.raises(UserError, match=r"quantizer of proj\.weight is static"):
        read(tree(proj=layer))


def test_stacks_without_a_quantizer_for_each_expert_are_refused() -> None:
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.zeros(2, 32, 64))
    experts.gate_up_proj_weight_quantizer = Quantizer(**FP8, amax=1.0)
    with pytest.raises(UserError, match=r"mlp\.experts\.gate_up_proj of shape \[2, 32, 64\] has 1 quantizers"):
        read(tree(mlp__experts=experts))


@pytest.mark.parametrize("amax", [2.5, [2.5], torch.tensor([[2.5]], dtype=torch.bfloat16)])
def test_an_absmax_of_any_shape_and_dtype_becomes_one_fp32_value(amax: Any) -> None:
    (weight,) = read(tree(proj=linear(32, 32, FP8, amax, {**FP8, "amax": amax}))).values()
    assert weight.input_amax is not None
    for value in (weight.absmax_of_rows(0, 32), weight.input_amax):
        assert (value.dtype, value.shape, value.item()) == (torch.float32, (), 2.5)


@pytest.mark.parametrize("shape", [(32,), (32, 1)])
def test_an_absmax_for_each_row_is_cut_by_rows(shape: tuple[int, ...]) -> None:
    amax = torch.arange(1, 33, dtype=torch.bfloat16).reshape(shape)
    (weight,) = read(tree(proj=linear(32, 32, FP8_PER_ROW, amax))).values()
    assert weight.absmax_of_rows(3, 6).tolist() == [4.0, 5.0, 6.0]


def test_an_absmax_of_part_of_the_rows_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"absmax of proj\.weight has shape \[16, 1\], but fp8_pc_pt needs one for each of 32"
    ):
        read(tree(proj=linear(32, 32, FP8_PER_ROW, torch.ones(16, 1))))
    with pytest.raises(UserError, match=r"shape \[32, 1\], but fp8 needs one value"):
        read(tree(proj=linear(32, 32, FP8, torch.ones(32, 1))))


@pytest.mark.parametrize("amax", [float("inf"), -1.0])
def test_infinite_and_negative_absmax_values_are_refused(amax: float) -> None:
    with pytest.raises(UserError, match=r"absmax of proj\.weight is infinite or negative"):
        read(tree(proj=linear(32, 32, FP8, amax)))
    with pytest.raises(UserError, match=r"absmax of the inputs of proj\.weight is infinite or negative"):
        read(tree(proj=linear(32, 32, FP8, 1.0, {**FP8, "amax": amax})))


@pytest.mark.parametrize("settings", [FP8, NVFP4])
def test_an_all_zero_weight_gets_scale_one(settings: dict[str, Any]) -> None:
    """The reference takes the raw absmax and writes NaN."""
    sources = {"proj.weight": "proj.weight"}
    (weight,) = read_quantized(tree(proj=linear(32, 32, settings, 0.0)), sources).values()
    assert weight.unmeasured == {0: range(32)}
    weight = weight.measured({0: torch.zeros(32)})
    scale = next(iter(FORMATS[weight.format].scales(weight.absmax_of_rows(0, 32), torch.bfloat16).values()))
    assert scale == 1.0


@pytest.mark.parametrize("amax", [None, 0.0, float("nan")])
def test_a_missing_absmax_is_measured(amax: float | None) -> None:
    sources = {"proj.weight": "proj.weight"}
    (weight,) = read_quantized(tree(proj=linear(32, 32, FP8, amax)), sources).values()
    weight = weight.measured({0: torch.linspace(0, 3, 32)})
    assert not weight.unmeasured and weight.absmax_of_rows(0, 32) == 3.0


@pytest.mark.parametrize(("settings", "scale"), [(FP8, 1.0), (NVFP4, 1 / 448)])
@pytest.mark.parametrize("amax", [0.0, float("nan")])
def test_inputs_that_never_moved_get_the_scale_of_a_full_range(settings: Any, scale: float, amax: float) -> None:
    (weight,) = read(tree(proj=linear(32, 32, settings, 1.0, {**settings, "amax": amax}))).values()
    form = FORMATS[weight.format]
    assert form.input_scale is not None and weight.input_amax is not None
    assert form.input_scale(weight.input_amax, torch.bfloat16) == torch.tensor(scale)


def test_inputs_without_an_absmax_have_no_scale(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (weight,) = read(tree(proj=linear(32, 32, FP8, 1.0, FP8))).values()
        assert weight.input_amax is None and "has no absmax" in caplog.text
        caplog.clear()
        for inputs in (None, {**FP8, "amax": 1.0, "is_enabled": False}, {**FP8, "dynamic": True}):
            (weight,) = read(tree(proj=linear(32, 32, FP8, 1.0, inputs))).values()
            assert weight.input_amax is None
    assert not caplog.text


def attention(settings: list[dict[str, Any]]) -> nn.Module:
    amax = (1.0, 3.0, 2.0)
    layers = {
        f"attn__{leaf}_proj": linear(32, 32, one, value, {**one, "amax": value})
        for leaf, one, value in zip("qkv", settings, amax, strict=True)
    }
    return tree(**layers)


def test_layers_that_engines_join_share_in_formats_with_groups_only() -> None:
    for settings, weights in ((NVFP4, [3.0, 3.0, 3.0]), (FP8, [1.0, 3.0, 2.0])):
        found = read(attention([settings] * 3)).values()
        assert [one.absmax_of_rows(0, 32).item() for one in found] == weights
        assert [one.input_amax.item() for one in found if one.input_amax is not None] == weights


def test_other_layers_of_the_same_input_share_too() -> None:
    pairs = [("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("w1", "w3")]
    for pair in pairs:
        layers = {f"a__{leaf}": linear(32, 32, NVFP4, amax) for leaf, amax in zip(pair, (1.0, 2.0), strict=True)}
        layers["b__" + pair[0]] = linear(32, 32, NVFP4, 0.5)
        assert [one.absmax_of_rows(0, 32).item() for one in read(tree(**layers)).values()] == [2.0, 2.0, 0.5]


def test_joined_layers_in_several_formats_are_refused() -> None:
    with pytest.raises(UserError, match=r"k_proj\.weight is fp8 .*quantize all of them alike"):
        read(attention([NVFP4, FP8, NVFP4]))


def experts_apart(settings: dict[str, Any], weights: list[Any], inputs: list[Any]) -> nn.Module:
    model = nn.Module()
    for index, seen in enumerate(inputs):
        for leaf, amax in zip(("gate_proj", "up_proj", "down_proj"), weights, strict=True):
            one = {**settings} if seen is None else {**settings, "amax": seen}
            place(model, f"mlp.experts.{index}.{leaf}", linear(32, 32, settings, amax, one))
    return model


@pytest.mark.parametrize("settings", [FP8, NVFP4])
def test_gate_and_up_of_an_expert_always_share(settings: dict[str, Any]) -> None:
    found = read(experts_apart(settings, [1.0, 2.0, 0.5], [4.0]))
    assert [one.absmax_of_rows(0, 32).item() for one in found.values()] == [2.0, 2.0, 0.5]


def test_gate_and_up_of_an_expert_share_row_by_row() -> None:
    rows = torch.arange(1, 33, dtype=torch.float32)
    found = read(experts_apart(FP8_PER_ROW, [rows, rows.flip(0), rows], [None]))
    largest = torch.maximum(rows, rows.flip(0))
    assert torch.equal(found["mlp.experts.0.gate_proj.weight"].absmax_of_rows(0, 32), largest)
    assert torch.equal(found["mlp.experts.0.up_proj.weight"].absmax_of_rows(0, 32), largest)
    assert torch.equal(found["mlp.experts.0.down_proj.weight"].absmax_of_rows(0, 32), rows)


@pytest.mark.parametrize(
    ("inputs", "expected"), [([4.0, None, 0.0, 2.0], [4.0, 4.0, 4.0, 2.0]), ([None, 0.0], [0.5, 0.5])]
)
def test_an_expert_that_saw_no_token_takes_the_largest_input(inputs: Any, expected: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(experts_apart(FP8, [1.0, 1.0, 1.0], inputs))
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        values = [found[f"mlp.experts.{i}.{leaf}.weight"].input_amax for i in range(len(inputs))]
        assert [value.item() for value in values if value is not None] == expected
    assert "did not reach" in caplog.text


def test_fused_experts_have_one_place_each_and_missing_ones_are_measured_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        model = tree(mlp__experts=FusedExperts(NVFP4, [2.0, None, 0.0], None))
        sources = clean_state(model.state_dict(), 448, None).sources
        weight = read_quantized(model, sources)["mlp.experts.gate_up_proj"]
    assert weight.unmeasured == {1: range(64, 128), 2: range(128, 192)}
    assert weight.input_amax == 0.5 and "reached no expert" in caplog.text
    rows = torch.arange(64.0)
    weight = weight.measured({1: rows, 2: rows + 1})
    gate_and_up = [weight.absmax_of_rows(start, start + 32).item() for start in (64, 96, 128, 160)]
    assert gate_and_up == [63.0, 63.0, 64.0, 64.0]  # gate and up of an expert have one scale
    assert weight.absmax_of_rows(0, 32) == 2.0


def test_experts_without_a_gate_are_read_too() -> None:
    found = read(tree(mlp__experts=FusedExperts(FP8, [2.0, 3.0], 1.0, first="up_proj")))
    assert [one.absmax_of_rows(32, 64).item() for one in found.values()] == [3.0, 3.0]
    assert list(found) == ["mlp.experts.up_proj", "mlp.experts.down_proj"]


def test_tied_weights_share_their_inputs_and_must_have_one_absmax() -> None:
    model = tree(a=linear(32, 32, FP8, 1.0, {**FP8, "amax": 2.0}), b=linear(32, 32, FP8, 1.0, {**FP8, "amax": 5.0}))
    sources = {f"{name}.weight": f"{name}.weight" for name in "ab"}
    shared = share_amax(read_quantized(model, sources), {"b.weight": "a.weight"})
    assert [one.input_amax for one in shared.values()] == [5.0, 5.0]
    model.b.weight_quantizer._amax.fill_(3.0)
    with pytest.raises(UserError, match=r"b\.weight and a\.weight are tied"):
        share_amax(read_quantized(model, sources), {"b.weight": "a.weight"})


def test_an_embedding_whose_weight_is_shared_stays_as_it_is() -> None:
    model = tree(embed=nn.Embedding(32, 32), head=linear(32, 32, FP8))
    model.embed.weight_quantizer = Quantizer(**FP8, amax=1.0)
    assert list(read(model)) == ["embed.weight", "head.weight"]
    model.all_tied_weights_keys = {"head.weight": "embed.weight"}
    assert list(read(model)) == ["head.weight"]


def test_adapted_layers_are_read_by_the_name_of_their_base() -> None:
    wrapped = linear(32, 32, FP8)
    wrapped.base_layer = linear(32, 32, FP8, 2.0)
    wrapped.lora_A = linear(4, 32, FP8)
    model = nn.Module()
    model.proj = wrapped
    del wrapped.weight
    (weight,) = read(model, qlora=True).values()
    assert (weight.weight, weight.absmax_of_rows(0, 32).item()) == ("proj.weight", 2.0)


def test_a_module_under_two_names_is_read_under_both() -> None:
    layer = linear(32, 32, FP8)
    assert list(read(tree(a=layer, b=layer))) == ["a.weight", "b.weight"]
