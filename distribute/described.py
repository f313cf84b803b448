"""What the configuration of a written checkpoint says of its modules: the way back from JSON to schemes. Torch-free.

Only what this version writes is known; of anything else the answer is None, and who asks passes it over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from distribute.dialects import compressed_tensors, modelopt
from distribute.dialects.modelopt_blocks import MIXED
from distribute.recipe import matches
from distribute.scheme import GROUP_SIZES, PRESETS, Scheme

#: Fields of one operand that decide what is stored.
_FIELDS = ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype")


@dataclass(frozen=True)
class Described:
    """What a `quantization_config` block says. `dialect` is a key of `distribute.dialects.table.DIALECTS`."""

    dialect: str
    block: Mapping[str, Any]

    def scheme_of(self, module: str) -> Scheme | None:
        """How a quantized module is coded; None when that is unknown."""
        if self.dialect == "modelopt":
            layers = self.block.get("quantized_layers") or {}
            mixed = self.block.get("quant_algo") == MIXED
            layer = (layers.get(module) or {}) if mixed else self.block
            return _modelopt_schemes().get((layer.get("quant_algo"), layer.get("group_size") or 0))
        groups = (self.block.get("config_groups") or {}).values()
        for group in groups:
            targets = group.get("targets") or []
            if "Linear" in targets or any(matches(target, module) for target in targets):
                return _compressed_schemes().get(_operands(group))
        return None


def read_described(block: Mapping[str, Any]) -> Described | None:
    """The dialect of a `quantization_config` block; None when it is of another tool."""
    dialect = {"modelopt": "modelopt", "compressed-tensors": "compressed-tensors"}.get(str(block.get("quant_method")))
    return Described(dialect, block) if dialect else None


def _variants(dialect: str) -> Iterator[Scheme]:
    """Every scheme that a preset can mean in a dialect."""
    for preset in (preset for preset in PRESETS.values() if dialect not in preset.refused):
        scheme = preset.for_dialect(dialect)
        if scheme.weights.format != "int4":
            yield scheme
            continue
        for size in GROUP_SIZES:
            for symmetric in (True, False):
                weights = scheme.weights.model_copy(update={"group_size": size, "symmetric": symmetric})
                yield scheme.model_copy(update={"weights": weights})


@cache
def _modelopt_schemes() -> dict[tuple[Any, int], Scheme]:
    found: dict[tuple[Any, int], Scheme] = {}
    for scheme in _variants("modelopt"):
        block = modelopt.quantization_config({"layer": scheme}, [])
        found.setdefault((block["quant_algo"], block.get("group_size") or 0), scheme)
    return found


@cache
def _compressed_schemes() -> dict[tuple[Any, ...], Scheme]:
    found: dict[tuple[Any, ...], Scheme] = {}
    for scheme in _variants("compressed-tensors"):
        block = compressed_tensors.quantization_config({"layer": scheme}, [])
        found.setdefault(_operands(block["config_groups"]["group_0"]), scheme)
    return found


def _operands(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a group says of its operands, as far as it decides what is stored."""
    operands = (group.get(operand) for operand in ("weights", "input_activations"))
    return tuple(operand and tuple(operand.get(field) for field in _FIELDS) for operand in operands)
