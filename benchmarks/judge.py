"""One judge for checkpoints of every maker: the source model with their weights, and inputs coded as an engine would.

    weights   decoded by this project's codecs, which tests hold against the references
    inputs    coded and decoded again before every quantized linear layer, as the preset's scheme says; static scales
              are those of the checkpoint
    the rest  (norms, biases, embeddings) as the checkpoint has it, since smoothing changes norms

Products are computed in the model's dtype, as engines do; decoded values are rounded to it.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from distribute.dialects.table import DIALECTS
from distribute.numerics.codec import Codec, Ranges
from distribute.numerics.observers import absmax
from distribute.numerics.table import find_codec
from distribute.scheme import Quantizer, Scheme

FakeQuantize = Callable[[Tensor], Tensor]


class CheckpointError(Exception):
    """A checkpoint that does not hold what its scheme says."""


def load_judged(source: Path, checkpoint: Path, scheme: Scheme, dialect: str) -> nn.Module:
    """The model of `source` that behaves as `checkpoint` does.

    Raises:
        CheckpointError: a weight of the model is not in the checkpoint, or nothing in it is quantized.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    stored = read_tensors(checkpoint)
    codec = find_codec(DIALECTS[dialect].codec(scheme))
    quantized = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            own = {key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")}
            if isinstance(module, nn.Linear) and "weight_scale" in own:
                module.weight.copy_(codec.decode(own, module.in_features))
                module.register_forward_pre_hook(_coding_inputs(scheme, own))
                quantized += 1
            elif "weight" in own and hasattr(module, "weight"):
                module.weight.copy_(own["weight"])
            elif isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
                raise CheckpointError(f"{checkpoint} has no weight of {name}")
            if own.get("bias") is not None and "bias" in dict(module.named_parameters(recurse=False)):
                module.bias.copy_(own["bias"])
    if not quantized:
        raise CheckpointError(f"no layer of {checkpoint} is quantized")
    return model


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def _coding_inputs(scheme: Scheme, own: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    """A hook before a linear layer whose stored tensors are `own`."""
    smoothing = own.get("pre_quant_scale")
    fake = fake_quantizer(scheme.inputs, own) if scheme.inputs else None

    def hook(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0] if smoothing is None else inputs[0] * smoothing.to(inputs[0].dtype)
        return (fake(x.flatten(0, -2)).to(x.dtype).view_as(x) if fake else x,)

    return hook


def fake_quantizer(inputs: Quantizer, own: dict[str, Tensor]) -> FakeQuantize:
    """Codes [tokens, in] and decodes them to fp32. The codecs of ModelOpt's weights serve: a token is a row."""
    match inputs.format, inputs.granularity:
        case "fp8", "tensor":
            return _through("fp8.modelopt.tensor", {"weight_scale": own["input_scale"].float().reshape(1)})
        case "int8", "tensor":
            return _int8_tensor(own["input_scale"].float())
        case "fp8" | "int8" as form, "token":
            return _through(f"{form}.modelopt.channel")
        case "fp8", "group":
            return _in_groups(_through("fp8.modelopt.channel"), inputs.group_size)
        case "nvfp4", _:
            return _through("nvfp4.modelopt.16", {"weight_scale_2": _nvfp4_scale(own)})
        case "mxfp4" | "mxfp8" as form, _:
            return _through(f"{form}.modelopt.32")
    raise AssertionError(f"no way to judge {inputs.format} inputs by {inputs.granularity}")


def _nvfp4_scale(own: dict[str, Tensor]) -> Tensor:
    """A factor, which is stored as such by modelopt and as its reciprocal by compressed-tensors."""
    if "input_global_scale" in own:
        return own["input_global_scale"].float().reciprocal().reshape(())
    return own["input_scale"].float().reshape(())


def _through(key: str, whole: dict[str, Tensor] | None = None) -> FakeQuantize:
    codec: Codec = find_codec(key)

    def fake(x: Tensor) -> Tensor:
        values = whole or codec.weight_values(absmax(x), (x.shape[0], x.shape[1]), x.dtype)
        return codec.decode(values | codec.encode(x, values), x.shape[1])

    return fake


def _int8_tensor(scale: Tensor) -> FakeQuantize:
    codec = find_codec("int8.modelopt.channel")

    def fake(x: Tensor) -> Tensor:
        high = (scale * 127).expand(len(x), 1)
        return codec.decode(codec.encode(x, {}, ranges=Ranges(-high, high)), x.shape[1])

    return fake


def _in_groups(fake: FakeQuantize, size: int) -> FakeQuantize:
    """Every group of columns alone; the last one may be smaller."""

    def grouped(x: Tensor) -> Tensor:
        width = x.shape[1]
        padded = functional.pad(x, (0, -width % size))
        return fake(padded.reshape(-1, size)).view_as(padded)[:, :width]

    return grouped
