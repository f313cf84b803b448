"""Words of the JSON blocks; what nvidia-modelopt writes of whole models is in tests/distribute/live/test_blocks.py."""

import json
from typing import Any

import pytest

from distribute.dialects.modelopt_blocks import LayerFormat, exclude_modules, hf_quant_config, quantization_config
from distribute.errors import UserError
from tests.golden import GOLDEN


@pytest.mark.parametrize("case", json.loads((GOLDEN / "exclude_modules.json").read_text()))
def test_kept_names_are_shortened_as_the_reference_shortens_them(case: dict[str, Any]) -> None:
    assert exclude_modules(case["quantized"], case["kept"]) == case["exclude_modules"]


@pytest.mark.parametrize(
    ("name", "algo"),
    [("fp8_pb_wo", "FP8_PB_WO"), ("mxfp4", "MXFP4"), ("mxfp8", "MXFP8"), ("w4a8_nvfp4_fp8", "W4A8_NVFP4_FP8")],
)
def test_formats_that_the_reference_misnames_have_the_names_of_its_next_release(name: str, algo: str) -> None:
    """0.47 writes `fp8_pb_wo` and `mxfp4` in lower case without a group size; no loader takes that. 0.48 repairs it."""
    layers = {"a": LayerFormat(name, 32), "b": None}
    quantization = hf_quant_config(layers)["quantization"]
    assert (quantization["quant_algo"], quantization["group_size"]) == (algo, 32)
    block = quantization_config(layers)
    assert (block["quant_algo"], block["group_size"]) == (algo, 32)
    assert "weights" in block["config_groups"]["group_0"]


def test_a_mixed_checkpoint_calls_inputs_that_are_scaled_at_run_time_dynamic() -> None:
    """0.47 says of these inputs that they are static; 0.48 says what they are."""
    block = quantization_config({"a": LayerFormat("fp8_pc_pt"), "b": LayerFormat("nvfp4", 16)})
    assert block["config_groups"]["group_0"] == {
        "input_activations": {"dynamic": True, "num_bits": 8, "type": "float", "strategy": "token"},
        "weights": {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "channel"},
        "targets": ["a"],
    }


def test_group_sizes_alone_make_a_mixed_checkpoint() -> None:
    layers = {
        "b": LayerFormat("nvfp4", 16),
        "a": LayerFormat("nvfp4", 32),
        "c": LayerFormat("nvfp4", 16),
        "head": None,
    }
    quantization = hf_quant_config(layers)["quantization"]
    assert quantization["quant_algo"] == "MIXED_PRECISION" and quantization["exclude_modules"] == ["head"]
    block = quantization_config(layers)
    assert [group["targets"] for group in block["config_groups"].values()] == [["b", "c"], ["a"]]
    assert block["quantized_layers"] == quantization["quantized_layers"] and "group_size" not in block


def test_formats_without_a_name_are_refused() -> None:
    with pytest.raises(UserError, match="format fp8_pb_real"):
        hf_quant_config({"a": LayerFormat("fp8_pb_real", 128)})
