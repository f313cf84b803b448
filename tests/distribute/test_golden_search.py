"""Smoothing against what nvidia-modelopt 0.47.0 searched for on the same model and batch.

`chosen.safetensors` holds what the reference found for each layer alone (tests/oracle/golden_modelopt.py). SmoothQuant
has nothing to search, so the checkpoints are equal. AWQ differs on purpose: layers that share an input search together
and their weights are rounded once, where the reference averages what each found and rounds again. So the error of the
outputs, not the choice, is compared; and the checkpoint byte for byte where the choice is given and nothing is shared.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from distribute.coded import Subject
from distribute.dialects import modelopt
from distribute.encode import FOLD, PARAMETERS
from distribute.folds import plan_folds
from distribute.job import Progress
from distribute.layerwise import LayerwiseModel
from distribute.numerics import awq, smoothquant
from distribute.numerics.moments import second_moments
from distribute.numerics.table import find_codec
from distribute.observe import observe
from distribute.ranks import Ranks
from distribute.solve import solve
from distribute.source import Checkpoint
from distribute.statistics import Statistics
from tests.exports import make_checkpoint, plan_of, read_tensors, weight_absmax
from tests.golden import GOLDEN, raw, read_golden

LAYER = "model.layers.0"
SHARED = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]
GROUP = 128
SOURCE = GOLDEN / "wide" / "source"


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
    model = AutoModelForCausalLM.from_pretrained(SOURCE, dtype="auto").eval()
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
    checkpoint = Checkpoint.open(SOURCE)
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
    found = awq.search_scale([weight], mean, [moments], [_nearest], group=GROUP)
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
    found = awq.search_scale(weights, mean, [moments] * len(leaves), [_nearest] * len(leaves), group=GROUP)
    # the reference averages what multiplies the inputs
    theirs = 1.0 / torch.stack([1.0 / chosen[f"{LAYER}.{leaf}.smooth"] for leaf in leaves]).mean(dim=0)

    def error(scale: torch.Tensor) -> float:
        return float(sum(awq.scale_error(weight, scale, moments, _nearest) for weight in weights))

    plain = error(torch.ones_like(theirs))
    assert error(found.scale) <= min(1.03 * error(theirs), plain)


def _statistics(recipe: dict[str, Any]) -> Statistics:
    plan = plan_of(SOURCE, recipe)
    found = observe(LayerwiseModel.open(Checkpoint.open(SOURCE)), [_batch()], plan.quantized)
    return Statistics(weight_absmax(SOURCE, plan), found.input_absmax, {"warnings": []})


def _without_producer(text: str) -> dict[str, Any]:
    value = json.loads(text)
    value.get("quantization_config", value).pop("producer")
    return value


def _json_differs(written: Path, preset: str) -> list[str]:
    """JSON files that differ, but for the group size that SGLang misses in those of 0.47."""
    differing = []
    for name in ("config.json", "hf_quant_config.json"):
        theirs = read_golden("wide", f"modelopt-{preset}/{name}")
        if "group_size" in read_golden("wide", f"modelopt-{preset}/hf_quant_config.json")["quantization"]:
            theirs.get("quantization_config", {})["group_size"] = GROUP
        if _without_producer((written / name).read_text()) != _without_producer(json.dumps(theirs)):
            differing.append(name)
    return differing


def test_a_smoothquant_checkpoint_equals_the_reference(tmp_path: Path) -> None:
    recipe = {"preset": "int8_smoothquant", "dialect": "modelopt"}
    plan, checkpoint = plan_of(SOURCE, recipe), Checkpoint.open(SOURCE)
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    folds = plan_folds(plan.schemes, shapes, "modelopt")
    subject = Subject(checkpoint, plan.schemes, "modelopt", folds, torch.bfloat16, torch.device("cpu"))
    solve(subject, [_batch()], ranks=Ranks.start(), folder=tmp_path, progress=Progress(tmp_path, 0))
    folder = make_checkpoint(SOURCE, tmp_path, recipe, _statistics(recipe))
    written, reference = read_tensors(folder), read_golden("wide", "modelopt-int8_smoothquant/model.safetensors")
    assert written.keys() == reference.keys()
    assert [name for name, tensor in reference.items() if raw(tensor) != raw(written[name])] == []
    assert _json_differs(folder, "int8_smoothquant") == []


@pytest.mark.parametrize("preset", ["int4_awq", "w4a8"])
def test_with_the_smoothing_of_the_reference_a_checkpoint_equals_its_own(tmp_path: Path, preset: str) -> None:
    """Byte for byte where nothing is shared; elsewhere in all but the codes that a second rounding moves by one."""
    recipe = {"preset": preset, "dialect": "modelopt"}
    reference = read_golden("wide", f"modelopt-{preset}/model.safetensors")
    (tmp_path / PARAMETERS).mkdir()
    save_file(_parameters_of(preset, reference), tmp_path / PARAMETERS / "0.safetensors")
    folder = make_checkpoint(SOURCE, tmp_path, recipe, _statistics(recipe))
    written = read_tensors(folder)
    assert written.keys() == reference.keys()
    assert [n for n, t in reference.items() if raw(t)[:2] != raw(written[n])[:2]] == []
    shared = [f"{LAYER}.{leaf}." for leaves in SHARED if len(leaves) > 1 for leaf in leaves]
    alone = [name for name in reference if not name.startswith(tuple(shared)) or name.endswith("input_scale")]
    assert [name for name in alone if raw(reference[name]) != raw(written[name])] == []
    assert _json_differs(folder, preset) == []
    plan = plan_of(SOURCE, recipe)
    for module, scheme in plan.schemes.items():
        codec, width = find_codec(modelopt.codec(scheme)), plan.matrices[module].shape[1]
        ours, theirs = (
            codec.decode({n.removeprefix(f"{module}."): t for n, t in tensors.items()}, width)
            for tensors in (written, reference)
        )
        step = reference[f"{module}.weight_scale"].repeat_interleave(GROUP, dim=1)
        assert ((ours - theirs).abs() / step).max() < 1.1
        assert ((ours - theirs).abs() / step > 0.5).float().mean() < 0.01


def _absmax(weight: torch.Tensor, smooth: torch.Tensor) -> torch.Tensor:
    return smoothquant.smoothed_weight(weight, smooth).abs().max().float()


def _parameters_of(preset: str, reference: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What our search would have left, had it found what the reference wrote."""
    chosen, found = _chosen(preset), {}
    for leaves in SHARED:
        modules = [f"{LAYER}.{leaf}" for leaf in leaves]
        own = [(1.0 / chosen[f"{module}.smooth"]).bfloat16() for module in modules]
        mean = torch.stack(own).mean(dim=0)
        for module, weight in zip(modules, _weights(leaves), strict=True):
            alone = len(modules) == 1
            smooth = chosen[f"{module}.smooth"] if alone else 1.0 / mean.float()
            found |= {f"{module}.smooth": smooth, f"{module}.absmax": _absmax(weight, smooth)}
            if alone:
                found[f"{module}.pre_quant_scale"] = own[0]
            if preset == "w4a8":
                found[f"{module}.input_absmax"] = reference[f"{module}.input_scale"] * 448
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{FOLD}{LAYER}.{norm}.weight"] = reference[f"{LAYER}.{norm}.weight"]
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}
