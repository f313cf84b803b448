"""Tied weights: which tensors of a checkpoint are left out because a loader makes them from others.

A tie is what the model declares (`all_tied_weights_keys`) or one Parameter under several names. Works on names, since
sharding gives each name a tensor of its own. A weight and its scales go together or not at all.
"""

import logging
from collections.abc import Iterable, Mapping

from torch import nn

from distribute.live.state import clean_name

log = logging.getLogger(__name__)

#: What goes with a weight. A bias does not: it is tied on its own or not at all.
COMPANIONS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
#: Fused expert weight -> leaf names of the modules that nvidia-modelopt unpacks it into.
UNPACKED = {
    "gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def tied_aliases(
    model: nn.Module,
    names: Iterable[str],
    formats: Mapping[str, str] | None = None,
    is_modelopt_qlora: bool = False,
) -> dict[str, str]:
    """Tensors to leave out -> those they equal; that they do is for the caller to check. Each rank for itself.

    Args:
        names: tensors in the checkpoint, by name as in memory.
        formats: weights that will be coded -> format, by the same names.
    """
    present, formats, aliases = set(names), formats or {}, {}
    for alias, canonical in _declared(model, is_modelopt_qlora).items():
        group = _group(alias, canonical, present)
        unmatched = [one for one, other in group.items() if other not in present]
        if unmatched or formats.get(alias) != formats.get(canonical):
            what = f"{canonical} has nothing for {unmatched[0]}" if unmatched else "their formats differ"
            log.warning("%s is tied to %s, but %s: both are written", alias, canonical, what)
            continue
        aliases.update(group)
    return aliases


def _declared(model: nn.Module, is_modelopt_qlora: bool) -> dict[str, str]:
    """Alias -> canonical weight, by names in the checkpoint; chains lead to their end."""
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        one = first.setdefault(id(parameter), name)
        if one != name and name not in ties and _end(one, ties) != name:
            ties[name] = one
    found = {alias: _end(alias, ties) for alias in ties}
    clean = {clean_name(a, is_modelopt_qlora): clean_name(c, is_modelopt_qlora) for a, c in found.items()}
    return {alias: canonical for alias, canonical in clean.items() if alias and canonical and alias != canonical}


def _end(name: str, ties: Mapping[str, str]) -> str:
    seen = {name}
    while (following := ties.get(name, name)) not in seen:
        seen.add(following)
        name = following
    return name


def _group(alias: str, canonical: str, present: set[str]) -> dict[str, str]:
    """What is left out together with an alias that is present; empty when it is not."""
    (one, _, leaf), (other, _, other_leaf) = alias.rpartition("."), canonical.rpartition(".")
    if leaf == other_leaf == "weight":
        prefixes = ((f"{one}." if one else ""), (f"{other}." if other else ""))
        group = {prefixes[0] + suffix: prefixes[1] + suffix for suffix in COMPANIONS}
        return {name: twin for name, twin in group.items() if name in present}
    if leaf == other_leaf and leaf in UNPACKED:
        members = [name for name in present if name.startswith(f"{one}.") and _is_part(name[len(one) + 1 :], leaf)]
        return {name: other + name[len(one) :] for name in sorted(members)}
    return {alias: canonical} if alias in present else {}


def _is_part(rest: str, leaf: str) -> bool:
    """Whether `3.gate_proj.weight_scale` or `gate_up_proj_weight_scale` comes from fused weight `leaf`."""
    words = rest.split(".")
    return any(word in UNPACKED[leaf] for word in words) or words[0] in {f"{leaf}_{suffix}" for suffix in COMPANIONS}
