"""How a linear layer is coded, and the presets that people choose from. Plain data, torch-free.

A `Scheme` says how weights and inputs are coded and which algorithm finds the values that the format leaves open.
A `Preset` is a scheme by name; where the two dialects differ in what they can say, it has one for each.
"""

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Dialect = Literal["modelopt", "compressed-tensors"]
#: Group sizes that engines have kernels for, the largest first: what `group_size: auto` tries.
GROUP_SIZES = (128, 64, 32)
#: Algorithms that run calibration text through the model to choose scales, smoothing or codes.
SOLVED = ("percentile", "mse", "smoothquant", "awq", "gptq")


class Algorithm(BaseModel):
    """How the values that a format leaves open are found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["max", "percentile", "mse", "smoothquant", "awq", "gptq"] = Field(
        default="max", description="max: the largest magnitude; the others: see docs/recipes.md"
    )
    percentile: float = Field(
        default=99.99, gt=50, le=100, description="percentile: share of the values that is covered"
    )
    alpha: float | Literal["search"] = Field(
        default=1.0, description="smoothquant: how much of the inputs' range moves to the weights, 0 to 1, or search"
    )
    clip: bool = Field(default=False, description="awq: also search how far each group is clipped")
    damping: float = Field(default=0.01, gt=0, le=1, description="gptq: this share of the mean diagonal is added")
    static_order: bool = Field(default=True, description="gptq: columns with the largest inputs first, groups kept")
    sequential: bool | None = Field(
        default=None, description="inputs are those after the quantized layers before; default: for awq and gptq"
    )
    all_experts: bool = Field(default=False, description="every expert sees every calibration token")

    @property
    def is_sequential(self) -> bool:
        """Whether a layer is calibrated with what the quantized layers before it give."""
        return self.name in ("awq", "gptq") if self.sequential is None else self.sequential


class Quantizer(BaseModel):
    """How one operand of a linear layer is coded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["fp8", "int8", "int4", "nvfp4", "mxfp4", "mxfp8"] = Field(
        description="number format of one element; fp8 is e4m3"
    )
    granularity: Literal["tensor", "channel", "token", "group", "block"] = Field(
        description="how many elements share one scale"
    )
    group_size: int = Field(default=0, description="elements of a group, or of a side of a block; 0 for the others")
    symmetric: bool = Field(default=True, description="no zero point")
    dynamic: bool = Field(default=False, description="the scale is computed by the engine at run time")

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 4 if self.format in ("int4", "nvfp4", "mxfp4") else 8


class Scheme(BaseModel):
    """How a linear layer is coded: y = dequantize(weights) @ dequantize(inputs)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: Quantizer
    inputs: Quantizer | None
    algorithm: Algorithm = Algorithm()

    @property
    def static_inputs(self) -> bool:
        """Whether the checkpoint holds a scale for the inputs."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def is_solved(self) -> bool:
        """Whether an algorithm runs the calibration text to find more than the range of inputs."""
        return self.algorithm.name in SOLVED

    @property
    def smooths(self) -> bool:
        """Whether the algorithm moves range between inputs and weights."""
        return self.algorithm.name in ("smoothquant", "awq")


@dataclass(frozen=True)
class Preset:
    """A scheme by name. `by_dialect`: where a dialect has another; `refused`: why a dialect has none."""

    scheme: Scheme
    by_dialect: dict[str, Scheme] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def for_dialect(self, dialect: str) -> Scheme:
        """The scheme that this preset means in a dialect."""
        return self.by_dialect.get(dialect, self.scheme)


def _tensor(form: Literal["fp8", "int8"]) -> Quantizer:
    return Quantizer(format=form, granularity="tensor")


def _channel(form: Literal["fp8", "int8"]) -> Quantizer:
    return Quantizer(format=form, granularity="channel")


def _token(form: Literal["fp8", "int8"]) -> Quantizer:
    return Quantizer(format=form, granularity="token", dynamic=True)


def _group(form: Literal["fp8", "int4", "nvfp4", "mxfp4", "mxfp8"], size: int, *, dynamic: bool = False) -> Quantizer:
    return Quantizer(format=form, granularity="group", group_size=size, dynamic=dynamic)


def _int8(algorithm: Algorithm) -> Preset:
    """ModelOpt stores one scale for the inputs; compressed-tensors has one a token, computed at run time.

    With one scale for all inputs smoothing has to take their whole range; with one a token, half of it is better.
    """
    static = Scheme(weights=_channel("int8"), inputs=_tensor("int8"), algorithm=algorithm)
    by_token = algorithm.model_copy(update={"alpha": 0.5})
    dynamic = Scheme(weights=_channel("int8"), inputs=_token("int8"), algorithm=by_token)
    return Preset(static, by_dialect={"compressed-tensors": dynamic})


def _same(form: Literal["nvfp4", "mxfp4", "mxfp8"], size: int, algorithm: Algorithm, *, dynamic: bool) -> Preset:
    """Weights and inputs in one format."""
    return Preset(Scheme(weights=_group(form, size), inputs=_group(form, size, dynamic=dynamic), algorithm=algorithm))


MAX, AWQ, GPTQ = Algorithm(), Algorithm(name="awq"), Algorithm(name="gptq")

PRESETS: dict[str, Preset] = {
    "fp8": Preset(Scheme(weights=_tensor("fp8"), inputs=_tensor("fp8"))),
    "fp8_dynamic": Preset(Scheme(weights=_channel("fp8"), inputs=_token("fp8"))),
    "fp8_block": Preset(
        Scheme(
            weights=Quantizer(format="fp8", granularity="block", group_size=128),
            inputs=_group("fp8", 128, dynamic=True),
        )
    ),
    "int8": _int8(MAX),
    "int8_smoothquant": _int8(Algorithm(name="smoothquant")),
    "int8_weight_only": Preset(Scheme(weights=_channel("int8"), inputs=None)),
    "int4": Preset(Scheme(weights=_group("int4", 128), inputs=None)),
    "int4_awq": Preset(Scheme(weights=_group("int4", 128), inputs=None, algorithm=AWQ)),
    "int4_gptq": Preset(Scheme(weights=_group("int4", 128), inputs=None, algorithm=GPTQ)),
    "w4a8": Preset(
        Scheme(weights=_group("int4", 128), inputs=_tensor("fp8"), algorithm=AWQ),
        refused={
            "compressed-tensors": "no engine reads int4 groups with two scales and fp8 inputs in that dialect; "
            "use the modelopt dialect, or int4_awq or fp8"
        },
    ),
    "nvfp4": _same("nvfp4", 16, MAX, dynamic=False),
    "nvfp4_awq": _same("nvfp4", 16, AWQ, dynamic=False),
    "nvfp4_weight_only": Preset(Scheme(weights=_group("nvfp4", 16), inputs=None)),
    "mxfp4": _same("mxfp4", 32, MAX, dynamic=True),
    "mxfp8": _same("mxfp8", 32, MAX, dynamic=True),
}
