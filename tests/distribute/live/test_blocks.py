"""Which module is in which format, against nvidia-modelopt 0.47 and by hand."""

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

from distribute.dialects.modelopt_blocks import LayerFormat
from distribute.dialects.spec import PRODUCER
from distribute.errors import UserError
from distribute.live.blocks import Layers, quantization_blocks, read_kv_format, read_layers
from tests.distribute.live.stand_ins import (
    CASES,
    FP8,
    FP8_PER_ROW,
    NVFP4,
    FusedExperts,
    Quantizer,
    from_golden,
    linear,
    read_case,
    tree,
)  # fmt: skip

#: What no quantized layer of these golden models has: 0.47 leaves it out of a mixed checkpoint, 0.48 writes it.
KEPT = {
    "llama": ["lm_head", "model.embed_tokens"],
    "qwen3_moe": ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"],
}


def expected(golden: dict[str, Any], case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both JSON files of 0.47, with what 0.48 adds: the group size of the block, what a mixed checkpoint leaves out."""
    separate, block = golden["hf_quant_config"], golden["quantization_config"]
    separate["producer"] = block["producer"] = PRODUCER
    if separate["quantization"]["quant_algo"] == "MIXED_PRECISION":
        separate["quantization"]["exclude_modules"] = block["ignore"] = KEPT[case.partition("-")[0]]
    if size := separate["quantization"].get("group_size"):
        block["group_size"] = size
    return separate, block


@pytest.mark.parametrize("case", CASES)
def test_json_blocks_equal_the_reference(case: str) -> None:
    golden = read_case(case)
    model = from_golden(golden)
    layers, kv = read_layers(model), read_kv_format(model)
    written = quantization_blocks(layers, layers.formats, kv, None)
    assert written == expected(golden, case)
    in_order = [list(golden["hf_quant_config"]["quantization"]), list(golden["quantization_config"])]
    found = [list(written[0]["quantization"]), [key for key in written[1] if key != "group_size"]]  # type: ignore[index]
    assert found == [in_order[0], [key for key in in_order[1] if key != "group_size"]]


@pytest.mark.parametrize(
    ("weight", "inputs", "name"),
    [
        (FP8, FP8, "fp8"),
        (FP8, None, "fp8"),
        (FP8_PER_ROW, FP8, "fp8_pc_pt"),
        ({"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}}, None, "fp8_pb_wo"),
        ({"num_bits": (4, 3), "block_sizes": {-1: 128, -2: 128}, "fake_quant": False}, None, "fp8_pb_real"),
        ({"num_bits": (4, 3), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}, None, "mxfp8"),
        (NVFP4, NVFP4, "nvfp4"),
        (NVFP4, None, "w4a16_nvfp4"),
        (NVFP4, FP8, "w4a8_nvfp4_fp8"),
        ({"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}}, None, "w4a16_mxfp4"),
        (
            {"num_bits": (2, 1), "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)}},
            FP8,
            "w4a8_mxfp4_fp8",
        ),
        ({"num_bits": 4, "block_sizes": {-1: 128}}, None, "int4_awq"),
        ({"num_bits": 8, "axis": 0}, {"num_bits": 8}, "int8_sq"),
        ({"num_bits": 8, "axis": 0}, None, "int8_wo"),
    ],
)
def test_settings_have_the_names_of_the_reference(weight: Any, inputs: Any, name: str) -> None:
    found = read_layers(tree(proj=linear(128, 128, weight, inputs=inputs))).formats["proj"]
    assert found is not None and found.id == name
    assert found.group_size == weight.get("block_sizes", {}).get(-1, 0)


def test_smoothed_inputs_and_adapters_make_other_formats() -> None:
    smoothed, adapted, fused = (linear(32, 32, NVFP4, inputs=NVFP4) for _ in range(3))
    smoothed.input_quantizer._pre_quant_scale = torch.ones(32)
    adapted.weight_quantizer.svdquant_lora_a = torch.ones(2, 32)
    fused.fused_with_prequant = True
    found = read_layers(tree(a=smoothed, b=adapted, c=fused)).formats
    assert [layer and layer.id for layer in found.values()] == ["nvfp4_awq", "nvfp4_svdquant", "nvfp4_awq"]


def test_a_disabled_quantizer_names_a_module_that_is_left_out() -> None:
    model = tree(
        proj=linear(32, 32, FP8, inputs=FP8), head=linear(32, 32, FP8, is_enabled=False), norm=nn.LayerNorm(4)
    )
    assert read_layers(model).formats == {"proj": LayerFormat("fp8"), "head": None}


def test_routers_are_left_out_by_structure() -> None:
    block = tree(experts=FusedExperts(FP8, [1.0, 1.0], 1.0), gate=nn.Linear(4, 2), shared_expert_gate=nn.Linear(4, 1))
    found = read_layers(tree(mlp=block)).formats
    assert found == {"mlp.experts": LayerFormat("fp8"), "mlp.gate": None, "mlp.shared_expert_gate": None}


def test_adapters_and_what_wraps_them_are_not_listed_and_the_base_has_its_own_name() -> None:
    wrapped = linear(32, 32, FP8)
    wrapped.base_layer = linear(32, 32, FP8)
    wrapped.lora_A = linear(4, 32, FP8, is_enabled=False)
    assert read_layers(tree(attn__q_proj=wrapped), is_modelopt_qlora=True).formats == {
        "attn.q_proj": LayerFormat("fp8")
    }


def test_two_stages_have_a_name_only_as_the_reference_stacks_them() -> None:
    layer = linear(32, 128, FP8)
    layer.weight_quantizer = nn.Sequential(Quantizer(4, block_sizes={-1: 128}), Quantizer((4, 3)))
    assert read_layers(tree(proj=layer)).formats == {"proj": LayerFormat("w4a8_awq", 128)}
    layer.weight_quantizer = nn.Sequential(Quantizer((4, 3)), Quantizer((4, 3)))
    with pytest.raises(UserError, match=r"proj\.weight is of no known format"):
        read_layers(tree(proj=layer))


def test_experts_of_one_block_in_several_formats_are_refused() -> None:
    experts = FusedExperts(FP8, [1.0, 1.0], 1.0)
    experts.down_proj_weight_quantizers[1]._disabled = True
    with pytest.raises(UserError, match=r"mlp\.experts\.down_proj have several formats \(fp8, none\)"):
        read_layers(tree(mlp__experts=experts))
    experts.down_proj_weight_quantizers[0]._disabled = True
    with pytest.raises(UserError, match=r"weights of mlp\.experts have several formats"):
        read_layers(tree(mlp__experts=experts))


def packed(weight: torch.Tensor, **scales: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    for name, scale in scales.items():
        module.register_buffer(name, scale)
    return module


def packed_model() -> nn.Module:
    """Packed as nvidia-modelopt leaves experts: no quantizers, a module for each projection."""
    one = torch.ones(())
    codes, blocks = torch.zeros(8, 16, dtype=torch.uint8), torch.zeros(8, 2).to(torch.float8_e4m3fn)
    experts = {
        f"mlp__experts__{i}__{leaf}": packed(codes, weight_scale=blocks, weight_scale_2=one, input_scale=one)
        for i in range(2)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    q_proj = packed(torch.zeros(8, 8).to(torch.float8_e4m3fn), weight_scale=one)
    return tree(attn__q_proj=q_proj, lm_head=nn.Linear(8, 8), **experts)


def test_packed_weights_tell_their_format_by_their_scales() -> None:
    layers = read_layers(packed_model())
    assert layers.formats == {
        "lm_head": None,
        "attn.q_proj": LayerFormat("fp8"),
        "mlp.experts": LayerFormat("nvfp4", 16),
    }
    assert not layers.from_quantizers


def test_packed_weights_whose_quantizers_are_left_have_their_format_from_these() -> None:
    layer = linear(8, 8, FP8, inputs=FP8)
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    layer.register_buffer("weight_scale", torch.ones(8))
    assert read_layers(tree(proj=layer)).formats == {"proj": LayerFormat("fp8")}


def test_a_packed_model_without_quantizers_keeps_the_block_it_came_with() -> None:
    own = {"quant_method": "fbgemm_fp8"}
    layers = read_layers(packed_model())
    assert quantization_blocks(layers, layers.formats, None, own) == (None, own)
    separate, block = quantization_blocks(layers, layers.formats, None, None)
    assert separate is not None and block is not None and block["quant_algo"] == "MIXED_PRECISION"


def test_packed_weights_that_nothing_describes_are_refused() -> None:
    model = tree(attn__q_proj=packed(torch.zeros(8, 8, dtype=torch.int32)))
    with pytest.raises(UserError, match=r"attn\.q_proj is packed"):
        quantization_blocks(read_layers(model), {}, None, None)
    own = {"quant_method": "gptq"}
    assert quantization_blocks(read_layers(model), {}, None, own) == (None, own)


def test_a_stale_block_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert quantization_blocks(read_layers(tree(proj=nn.Linear(2, 2))), {}, None, {"quant_method": "fp8"}) == (
            None,
            None,
        )
    assert "quantization_config is left out" in caplog.text


def test_a_quantized_cache_alone_makes_blocks() -> None:
    separate, block = quantization_blocks(Layers({}, False), {}, "FP8", None)
    assert separate is not None and separate["quantization"] == {
        "quant_algo": None, "kv_cache_quant_algo": "FP8", "quantized_layers": {},
    }  # fmt: skip
    assert block is not None and block["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    json.dumps([separate, block])


def cache(bits: Any, second: Any = None, *, affine: bool = False) -> nn.Module:
    module = nn.Module()
    module.k_bmm_quantizer, module.v_bmm_quantizer = Quantizer(bits), Quantizer(second or bits)
    if affine:
        module.k_bmm_quantizer._bias_value = module.v_bmm_quantizer._bias_value = torch.zeros(1)
    return module


def test_cache_format_is_read_from_its_quantizers() -> None:
    assert read_kv_format(tree(attn=cache((4, 3)))) == "FP8"
    assert read_kv_format(tree(attn=cache((4, 3), affine=True))) == "FP8"  # as the reference says it
    assert read_kv_format(tree(attn=cache((2, 1)))) == "NVFP4"
    assert read_kv_format(tree(attn=cache((2, 1), affine=True))) == "NVFP4_AFFINE"
    assert read_kv_format(tree(attn=nn.Linear(2, 2))) is None


def test_cache_formats_that_no_checkpoint_holds_are_refused() -> None:
    with pytest.raises(UserError, match="attn quantizes its K/V cache with num_bits 8"):
        read_kv_format(tree(attn=cache(8)))
    with pytest.raises(UserError, match=r"several formats \(FP8 in attn, NVFP4 in attn\)"):  # 0.47 says FP8 for both
        read_kv_format(tree(attn=cache((4, 3), (2, 1))))
