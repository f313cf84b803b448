"""Smoothing against what nvidia-modelopt 0.47.0 searched for on the same model and batch.

`chosen.safetensors` holds what the reference found for each layer alone (tests/oracle/golden_modelopt.py). SmoothQuant
has nothing to search, so all is equal. AWQ differs on purpose: layers that share an input search together, where the
reference averages what each found; so the error of the outputs, not the choice, is compared there.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from distribute.layerwise import LayerwiseModel
from distribute.numerics import awq, smoothquant
from distribute.numerics.moments import second_moments
from distribute.observe import observe
from distribute.source import Checkpoint
from tests.golden import GOLDEN, raw, read_golden

LAYER = "model.layers.0"
SHARED = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]
GROUP = 128


def _chosen(preset: str) -> dict[str, torch.Tensor]:
    return read_golden("wide", f"modelopt-{preset}/chosen.safetensors")


def _weights(leaves: Iterable[str]) -> list[torch.Tensor]:
    source = read_golden("wide", "source/model.safetensors")
    return [source[f"{LAYER}.{leaf}.weight"] for leaf in leaves]


def _batch() -> torch.Tensor:
    return torch.tensor(read_golden("wide", "calibration.json")["input_ids"])


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    """What every linear layer of the model reads on the calibration batch, bf16 [tokens, in]."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "wide" / "source", dtype="auto").eval()
    seen: dict[str, torch.Tensor] = {}

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen[name] = args[0].flatten(0, -2)

        module.register_forward_pre_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(LAYER):
            watch(name.removeprefix(f"{LAYER}."), module)
    with torch.no_grad():
        model(_batch())
    return seen


def _nearest(weight: torch.Tensor) -> torch.Tensor:
    """Int4 codes of the reference in groups of 128, decoded."""
    groups = weight.unflatten(1, (-1, GROUP)).float()
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    scale[scale == 0] = 1.0
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


def test_smoothquant_equals_the_reference() -> None:
    checkpoint = Checkpoint.open(GOLDEN / "wide" / "source")
    modules = [f"{LAYER}.{leaf}" for leaves in SHARED for leaf in leaves]
    channels = observe(LayerwiseModel.open(checkpoint), [_batch()], modules, channels=True).channel_absmax
    written = read_golden("wide", "modelopt-int8_smoothquant/model.safetensors")
    chosen = _chosen("int8_smoothquant")
    for leaves in SHARED:
        columns = [smoothquant.column_absmax(weight) for weight in _weights(leaves)]
        found = smoothquant.smoothing(channels[f"{LAYER}.{leaves[0]}"], columns)
        for leaf, weight in zip(leaves, _weights(leaves), strict=True):
            module = f"{LAYER}.{leaf}"
            assert raw(found.smooth) == raw(chosen[f"{module}.smooth"])
            assert raw(found.pre_quant_scale) == raw(written[f"{module}.pre_quant_scale"])
            input_scale = found.input_absmax(channels[module]) / 127
            assert raw(input_scale) == raw(written[f"{module}.input_scale"])
            smoothed = smoothquant.smoothed_weight(weight, found.smooth)
            scale = smoothed.abs().amax(dim=1).float() / 127
            assert raw(torch.where(scale == 0, 1.0, scale)) == raw(written[f"{module}.weight_scale"])


@pytest.mark.parametrize("leaf", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_layer_alone_measures_the_errors_of_the_reference_and_one_of_its_best_exponents(
    inputs: dict[str, torch.Tensor], leaf: str
) -> None:
    chosen, (weight,) = _chosen("int4_awq"), _weights([leaf])
    mean, moments = inputs[leaf].abs().mean(0).float(), second_moments(inputs[leaf])
    found = awq.search_scale([weight], mean, moments, [_nearest], group=GROUP)
    per_element = found.errors[1:] / (inputs[leaf].shape[0] * weight.shape[0])  # the first is no scaling: ours alone
    # the reference rounds outputs to bf16 before it compares them
    torch.testing.assert_close(per_element.float(), chosen[f"{LAYER}.{leaf}.loss"], rtol=0.05, atol=0)
    losses = chosen[f"{LAYER}.{leaf}.loss"]
    assert found.alpha is not None
    assert losses[round(found.alpha * 10)] <= 1.02 * losses.min()
    theirs = awq.weight_scale(mean, awq.relative_magnitudes(weight, GROUP), float(chosen[f"{LAYER}.{leaf}.alpha"]))
    torch.testing.assert_close(theirs, chosen[f"{LAYER}.{leaf}.smooth"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("leaves", SHARED)
def test_what_awq_finds_errs_hardly_more_than_what_the_reference_wrote(
    inputs: dict[str, torch.Tensor], leaves: list[str]
) -> None:
    chosen, weights = _chosen("int4_awq"), _weights(leaves)
    mean, moments = inputs[leaves[0]].abs().mean(0).float(), second_moments(inputs[leaves[0]])
    found = awq.search_scale(weights, mean, moments, [_nearest] * len(leaves), group=GROUP)
    # the reference averages what multiplies the inputs
    theirs = 1.0 / torch.stack([1.0 / chosen[f"{LAYER}.{leaf}.smooth"] for leaf in leaves]).mean(dim=0)

    def error(scale: torch.Tensor) -> float:
        return float(sum(awq.scale_error(weight, scale, moments, _nearest) for weight in weights))

    plain = error(torch.ones_like(theirs))
    assert error(found.scale) <= min(1.03 * error(theirs), plain)
