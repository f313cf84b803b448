"""Names and values of a model's state in its checkpoint."""

import logging
from typing import Any

import pytest
import torch

from distribute.errors import UserError
from distribute.live.state import clean_name, clean_state
from tests.distribute.live.stand_ins import CASES, from_golden, read_case

ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_quantizers_is_left_but_the_scales_of_the_cache(case: str) -> None:
    golden = read_case(case)
    kv = golden["hf_quant_config"]["quantization"]["kv_cache_quant_algo"]
    clean = clean_state(from_golden(golden).state_dict(), 448, kv)
    assert clean.sources == {key: key for key in golden["state"]}
    reference = {key: value for key, value in golden["scales"].items() if key.endswith(("k_scale", "v_scale"))}
    assert {name: scale.item() for name, scale in clean.values.items()} == reference
    assert bool(reference) == ("-kv_" in case)
    assert all((scale.dtype, scale.shape) == (torch.float32, ()) for scale in clean.values.values())
    assert clean.shapes.keys() == clean.sources.keys() | clean.values.keys()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (f"{ATTENTION}.q_proj.weight", f"{ATTENTION}.q_proj.weight"),
        (f"{ATTENTION}.q_proj.bias", f"{ATTENTION}.q_proj.bias"),
        (f"{ATTENTION}.q_proj.weight_scale", f"{ATTENTION}.q_proj.weight_scale"),
        (f"{ATTENTION}.q_proj.weight_quantizer._amax", None),
        (f"{ATTENTION}.q_proj.weight_quantizer._global_amax", None),
        (f"{ATTENTION}.q_proj.weight_quantizer._scale", None),
        (f"{ATTENTION}.q_proj.weight_quantizer._double_scale", None),
        (f"{ATTENTION}.q_proj.weight_quantizer._scale_zeros", None),
        (f"{ATTENTION}.q_proj.weight_shape", None),
        (f"{ATTENTION}.q_proj.output_quantizer._amax", None),
        (f"{ATTENTION}.k_bmm_quantizer._amax", f"{ATTENTION}.k_proj.k_scale"),
        (f"{ATTENTION}.v_bmm_quantizer._amax", f"{ATTENTION}.v_proj.v_scale"),
        (f"{ATTENTION}.k_bmm_quantizer._bias_value", f"{ATTENTION}.k_proj.k_bias"),
        (f"{ATTENTION}.v_bmm_quantizer._bias_value", f"{ATTENTION}.v_proj.v_bias"),
        (f"{ATTENTION}.q_bmm_quantizer._amax", None),
        (f"{ATTENTION}.o_proj.input_quantizer._pre_quant_scale", f"{ATTENTION}.o_proj.pre_quant_scale"),
        ("mlp.experts.gate_up_proj_weight_quantizers.3._amax", None),
        ("vision_model.radio_model.summary_idxs", None),
        ("a.base_layer.weight", "a.base_layer.weight"),
        ("a.lora_A.default.weight", "a.lora_A.default.weight"),
    ],
)
def test_names_are_those_of_the_reference(key: str, name: str | None) -> None:
    assert clean_name(key) == name


def test_adapters_are_left_out_and_the_base_layer_takes_their_place() -> None:
    keys = ["a.base_layer.weight", "a.base_layer.weight_scale", "a.base_layer.bias", "a.lora_A.default.weight"]
    clean = clean_state({key: torch.zeros(2, 2) for key in keys}, 448, None, is_modelopt_qlora=True)
    assert clean.sources == {f"a.{leaf}": f"a.base_layer.{leaf}" for leaf in ("weight", "weight_scale", "bias")}


def test_two_tensors_of_one_name_are_refused() -> None:
    state = {"a.base_layer.weight": torch.zeros(2), "a.weight": torch.zeros(2)}
    with pytest.raises(UserError, match=r"two tensors .* become a\.weight"):
        clean_state(state, 448, None, is_modelopt_qlora=True)


def test_a_scale_of_one_matrix_loses_its_leading_axis() -> None:
    state = {
        "a.weight_scale": torch.zeros(1, 4, 2),
        "b.weight_scale": torch.zeros(3, 4, 2),
        "c.weight": torch.zeros(1, 4, 2),
    }
    shapes = clean_state(state, 448, None).shapes
    assert shapes == {"a.weight_scale": (4, 2), "b.weight_scale": (3, 4, 2), "c.weight": (1, 4, 2)}


def kv_state(amax: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {f"{ATTENTION}.k_bmm_quantizer._amax": torch.tensor(amax, dtype=dtype)}


@pytest.mark.parametrize("kv", [None, "INT8", "fp8", ""])
def test_a_calibrated_cache_needs_a_format_that_a_checkpoint_can_hold(kv: str | None) -> None:
    with pytest.raises(UserError, match=r"kv_cache_format is .*FP8, NVFP4, NVFP4_AFFINE"):
        clean_state(kv_state(1.0), 448, kv)
    assert clean_state({"a.weight": torch.zeros(2)}, 448, kv).values == {}


@pytest.mark.parametrize("maxbound", [0, -1.0, float("nan")])
def test_maxbound_must_be_positive_where_it_divides(maxbound: float) -> None:
    with pytest.raises(UserError, match="maxbound"):
        clean_state(kv_state(1.0), maxbound, "FP8")
    assert clean_state({"a.weight": torch.zeros(2)}, maxbound, "FP8").values == {}


def test_cache_scales_are_fp32_quotients_without_a_least_value(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for amax in (3.3125, [3.3125]):
            scale = clean_state(kv_state(amax), 448, "FP8").values[f"{ATTENTION}.k_proj.k_scale"]
            assert scale.shape == () and scale == torch.tensor(3.3125) / torch.tensor(448.0)
    assert not caplog.text


def test_only_an_fp8_cache_warns_of_a_large_scale(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        clean_state(kv_state(300.0), 448, "NVFP4")
        assert not caplog.text
        clean_state(kv_state(300.0), 448, "FP8")
    assert "a scale of 0.67" in caplog.text


@pytest.mark.parametrize("amax", [0.0, float("nan")])
def test_a_cache_that_saw_nothing_gets_scale_one(amax: float, caplog: pytest.LogCaptureFixture) -> None:
    """The reference writes the 0 or NaN, by which loaders divide."""
    with caplog.at_level(logging.WARNING):
        assert clean_state(kv_state(amax), 448, "FP8").values[f"{ATTENTION}.k_proj.k_scale"] == 1.0
    assert "saw nothing" in caplog.text


@pytest.mark.parametrize("amax", [[1.0, 2.0], float("inf")])
def test_cache_scales_of_another_shape_or_without_a_value_are_refused(amax: Any) -> None:
    with pytest.raises(UserError, match="must be one finite value"):
        clean_state(kv_state(amax), 448, "FP8")


def test_a_cache_on_the_meta_device_is_refused() -> None:
    with pytest.raises(UserError, match="meta device"):
        clean_state({"k_bmm_quantizer._amax": torch.empty((), device="meta")}, 448, "FP8")
