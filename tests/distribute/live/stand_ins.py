"""Models with the quantizers of nvidia-modelopt, without nvidia-modelopt: the same attributes, buffers and names.

`from_golden` rebuilds a model that nvidia-modelopt 0.47 quantized from what tests/oracle/make_live_goldens.py noted.
"""

import json
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden import GOLDEN

CASES = sorted(path.stem for path in (GOLDEN / "live").glob("*.json"))
FP8 = {"num_bits": (4, 3)}
FP8_PER_ROW = {"num_bits": (4, 3), "axis": 0}
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}


class Quantizer(nn.Module):
    """A TensorQuantizer as far as an exporter sees it."""

    def __init__(
        self,
        num_bits: Any = 8,
        amax: Any = None,
        *,
        block_sizes: dict[Any, Any] | None = None,
        axis: Any = None,
        is_enabled: bool = True,
        dynamic: bool = False,
        fake_quant: bool = True,
    ):
        super().__init__()
        self.num_bits, self.block_sizes, self.axis, self.fake_quant = num_bits, block_sizes, axis, fake_quant
        self._disabled, self._dynamic = not is_enabled, dynamic
        if amax is not None:
            value = amax if isinstance(amax, Tensor) else torch.tensor(amax, dtype=torch.bfloat16)
            self.register_buffer("_amax", value)

    @property
    def is_enabled(self) -> bool:
        return not self._disabled


def linear(
    out: int, width: int, weight: dict[str, Any], amax: Any = 1.0, inputs: Any = None, **more: Any
) -> nn.Linear:
    """A quantized linear layer in bf16. `inputs`: settings and absmax of its input quantizer; None: disabled."""
    layer = nn.Linear(width, out, bias=False, dtype=torch.bfloat16)
    layer.weight_quantizer = Quantizer(**weight, amax=amax, **more)
    layer.input_quantizer = Quantizer(**inputs) if inputs else Quantizer(is_enabled=False)
    return layer


class FusedExperts(nn.Module):
    """As transformers and nvidia-modelopt hold experts: 3-D weights, a quantizer for each expert."""

    def __init__(self, settings: dict[str, Any], amax: list[Any], inputs: Any, *, first: str = "gate_up_proj"):
        super().__init__()
        rows = 64 if first == "gate_up_proj" else 32
        for name, shape in ((first, (rows, 32)), ("down_proj", (32, 32))):
            weight = torch.randn(len(amax), *shape, dtype=torch.bfloat16)
            setattr(self, name, nn.Parameter(weight))
            setattr(self, f"{name}_weight_quantizers", nn.ModuleList(Quantizer(**settings, amax=one) for one in amax))
            setattr(self, f"{name}_input_quantizer", Quantizer(**settings, amax=inputs))


def tree(**children: nn.Module) -> nn.Module:
    """A module with these children; `__` in a name is a dot."""
    root = nn.Module()
    for path, module in children.items():
        place(root, path.replace("__", "."), module)
    return root


def place(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, leaf = path.split(".")
    parent(root, parents).add_module(leaf, module)


def parent(root: nn.Module, parents: list[str]) -> nn.Module:
    for index, word in enumerate(parents):
        if word not in dict(root.named_children()):
            above = ".".join(parents[: index + 1])
            root.add_module(word, nn.ModuleList() if above.endswith("_weight_quantizers") else nn.Module())
        root = root.get_submodule(word)
    return root


def read_case(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / "live" / f"{case}.json").read_text())


def from_golden(golden: dict[str, Any]) -> nn.Module:
    """The model of a golden case; weights are zeros, absmax values are what they were."""
    model = nn.Module()
    for key, (dtype, shape) in golden["state"].items():
        *parents, leaf = key.split(".")
        parent(model, parents).register_parameter(leaf, nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))))
    for path, (number, amax) in golden["quantizers"].items():
        settings = dict(golden["settings"][number])
        settings["num_bits"] = tuple(b) if isinstance(b := settings["num_bits"], list) else b
        if settings["block_sizes"]:
            settings["block_sizes"] = {-1 if k == "-1" else k: v for k, v in settings["block_sizes"].items()}
        place(model, path, Quantizer(**{k.lstrip("_"): v for k, v in settings.items()}, amax=amax))
    return model
