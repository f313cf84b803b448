"""Names, shapes and rows on the Hub of a live model's state tensors.

Owns what the model's mapping does not know: scales follow the weight of their module, experts that were unpacked
into modules of their own get the names that the Hub has for them, and module names follow their weights. Knows
shapes only. The answer is a pure function of model class and shapes: every rank computes the same.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from torch import nn

from distribute.errors import UserError
from distribute.layers import expert_of, natural_key
from distribute.live.companions import companion, is_companion, weight_of
from distribute.live.conversion import PROBE_WIDTH, Conversion, HubTensor, Part, Shape, whole

__all__ = ["HubTensor", "Part", "hub_module_names", "hub_tensors"]

#: Parts of a fused expert weight, in order, as nvidia-modelopt names the modules that it unpacks it into.
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A module that was rows of expert `index` in the weight `fused`: stretch `part` of `parts`."""

    fused: str
    index: int
    part: int
    parts: int


def hub_tensors(model: nn.Module, shapes: Mapping[str, Shape]) -> list[HubTensor]:
    """The tensors on the Hub that a model's state makes, in natural order of their names. Any rank, alone.

    `shapes` are the global shapes of everything that will be written, by name in memory; of tied tensors only one.
    For weights this is what `model.save_pretrained` writes.

    Raises:
        UserError: a tensor on the Hub is not made of whole rows, scales do not fit their weight, or two tensors get
            one name.
    """
    conversion = Conversion(model)
    unpacked = _unpacked(conversion, (key.rpartition(".")[0] for key in shapes), shapes)
    attached: dict[str, dict[str, str]] = defaultdict(dict)  # leaf -> weight in memory -> companion
    renamed, weights = [], {}
    for key, shape in shapes.items():
        if key.rpartition(".")[0] in unpacked:
            renamed.append(key)
        elif found := weight_of(key, shapes):
            attached[found[1]][found[0]] = key
        elif is_companion(key):
            renamed.append(key)
        else:
            weights[key] = shape
    fused = _fused(unpacked.values(), shapes)
    converted = conversion.revert(weights | fused)
    homes = _homes(converted, unpacked)
    tensors = [whole(_moved(key, homes, conversion), key, shapes[key]) for key in renamed]
    for weight in converted:
        if fused.keys().isdisjoint(weight.sources):
            tensors.append(weight)
            beside = {leaf: {s: keys[s] for s in weight.sources if s in keys} for leaf, keys in attached.items()}
            tensors += [companion(weight, leaf, keys, shapes) for leaf, keys in beside.items() if keys]
    tensors.sort(key=lambda tensor: natural_key(tensor.name))
    _refuse_double(tensors)
    return tensors


def hub_module_names(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For module names in memory those on the Hub: several where the Hub splits the module. Any rank, alone.

    A name may also be that of a fused weight (`...experts.gate_up_proj`), of a module that nvidia-modelopt unpacks
    it into (`...experts.3.gate_proj`), or end in a wildcard (`model.layers.0.mlp*`), which stays.

    Raises:
        UserError: a tensor on the Hub is not made of whole rows.
    """
    conversion = Conversion(model)
    stems = {name: name.rstrip("*").rstrip(".") for name in names}
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    # Packed weights may be buffers.
    shapes |= {name: tuple(value.shape) for name, value in model.named_buffers() if name.endswith(".weight")}
    unpacked = _unpacked(conversion, stems.values(), ())
    converted = conversion.revert(shapes | _fused(unpacked.values(), shapes))
    found: dict[str, dict[str, None]] = defaultdict(dict)  # keys are an ordered set
    for tensor in converted:
        for source in tensor.sources:
            found[source.removesuffix(".weight")][tensor.name.removesuffix(".weight")] = None
    for module, home in _homes(converted, unpacked).items():
        found[module] = {home: None}
    # A module without a weight is renamed as its weight would be: many patterns end in a dot.
    return {
        name: tuple(
            home + name[len(stem) :]
            for home in found.get(stem) or [conversion.rename(f"{stem}.weight").removesuffix(".weight")]
        )
        for name, stem in stems.items()
    }


def _unpacked(conversion: Conversion, modules: Iterable[str], present: Container[str]) -> dict[str, _Unpacked]:
    """Those of the modules that stand for a part of a fused expert weight which is not `present` itself."""
    converts = cache(conversion.converts)
    found = {}
    for module in dict.fromkeys(modules):
        if expert := expert_of(module):
            choices = [(name, parts) for name, parts in EXPERT_PARTS.items() if expert.leaf in parts]
            for name, parts in [*choices, (expert.leaf, (expert.leaf,))]:
                fused = f"{expert.block}.{name}"
                if fused not in present and converts(fused):
                    found[module] = _Unpacked(fused, expert.index, parts.index(expert.leaf), len(parts))
                    break
    return found


def _fused(unpacked: Iterable[_Unpacked], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Stand-ins for the fused weights, with one row for each part of an expert."""
    stand_ins: dict[str, Shape] = {}
    for one in unpacked:
        least = stand_ins.get(one.fused) or shapes.get(one.fused) or (0,)
        stand_ins[one.fused] = (max(least[0], one.index + 1), one.parts, PROBE_WIDTH)
    return stand_ins


def _homes(converted: Iterable[HubTensor], unpacked: Mapping[str, _Unpacked]) -> dict[str, str]:
    """Module on the Hub of every unpacked module; without those that the Hub does not keep apart."""
    by_rows = {tensor.parts: tensor.name.removesuffix(".weight") for tensor in converted}
    homes = {}
    for module, one in unpacked.items():
        row = one.index * one.parts + one.part
        if home := by_rows.get((Part(one.fused, row, row + 1),)):
            homes[module] = home
    return homes


def _moved(key: str, homes: Mapping[str, str], conversion: Conversion) -> str:
    """The name on the Hub of a tensor that stays whole."""
    module, _, leaf = key.rpartition(".")
    return f"{homes[module]}.{leaf}" if module in homes else conversion.rename(key)


def _refuse_double(tensors: Iterable[HubTensor]) -> None:
    seen: dict[str, HubTensor] = {}
    for tensor in tensors:
        if other := seen.get(tensor.name):
            raise UserError(
                f"{', '.join(other.sources)} and {', '.join(tensor.sources)} are both {tensor.name} on the Hub; "
                "the model's conversion mapping does not fit its modules, so save it with model.save_pretrained"
            )
        seen[tensor.name] = tensor
