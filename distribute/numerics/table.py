"""Every number format by key: "<format>.<dialect>.<granularity or group size>[.asymmetric]"; scales of inputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from distribute.numerics import fp8, fp8_block, fp8_codec, int4, int8, mx, nvfp4_codec
from distribute.numerics.codec import Codec

_CODECS: dict[str, Codec] = {
    **fp8_codec.CODECS,
    **{key.replace("fp8_block", "fp8").replace("128", "block"): codec for key, codec in fp8_block.CODECS.items()},
    **int8.CODECS,
    **int4.CODECS,
    **nvfp4_codec.CODECS,
    **mx.CODECS,
}  # fmt: skip
_Values = Callable[[Tensor, torch.dtype], dict[str, Tensor]]


def find_codec(key: str) -> Codec:
    """The codec of a key that a dialect's `codec` made."""
    return _CODECS[key]


def input_values(form: str, dialect: str, absmax: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored scales of the inputs of a layer, by suffix, from their absmax fp32 0-dim and the model's dtype."""
    return _INPUTS[form, dialect](absmax, dtype)


def _fp8(dialect: str) -> _Values:
    scale = fp8.CODECS[f"fp8.{dialect}.tensor"].input_scale
    return lambda absmax, dtype: {"input_scale": scale(absmax, dtype)}


#: Formats whose inputs have a scale in the checkpoint.
_INPUTS: dict[tuple[str, str], _Values] = {
    ("fp8", "modelopt"): _fp8("modelopt"),
    ("fp8", "compressed-tensors"): _fp8("compressed-tensors"),
    ("int8", "modelopt"): int8.modelopt_input_values,
    ("nvfp4", "modelopt"): nvfp4_codec.modelopt_input_values,
    ("nvfp4", "compressed-tensors"): nvfp4_codec.compressed_tensors_input_values,
}
