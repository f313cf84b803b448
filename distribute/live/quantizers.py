"""Weights that nvidia-modelopt has fake-quantized, with the absmax values that its quantizers hold.

Owns which values are missing, which are guarded, and who shares one (as `export_hf_checkpoint` of 0.47 does before it
packs). Reads no weight: an absmax that no quantizer has is measured by the caller, over all ranks. Values leave here
as fp32 on CPU.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from distribute.errors import UserError
from distribute.layers import FUSED_LEAVES, expert_of
from distribute.live.encode import FORMATS
from distribute.live.formats import Site, is_packed, shares_weight, sites
from distribute.live.state import replicated_value

log = logging.getLogger(__name__)

#: Leaf names of linear layers that read the same input; some engines load the later rows as one matrix too.
SAME_INPUT = (*FUSED_LEAVES, ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"))
#: Input absmax of an expert that saw no token, when no other expert saw one either.
UNSEEN_INPUT = 0.5


@dataclass(frozen=True)
class Quantized:
    """A float weight to be coded.

    `weight`: its name in the checkpoint, as in memory. `rows`: flat rows that share a place in `weight_amax`.
    `weight_amax`: fp32 on CPU, one, or one for each expert of a fused 3-D weight; 0-dim, or [rows] when the format
    has a scale for each row; None where it is to be measured. `input_amax`: fp32 0-dim, None without static inputs.
    """

    weight: str
    format: str
    group_size: int
    rows: int
    weight_amax: tuple[Tensor | None, ...]
    input_amax: Tensor | None

    @property
    def unmeasured(self) -> dict[int, range]:
        """Place in `weight_amax` -> the flat rows of the weight whose absmax is to be measured."""
        spans = {place: range(place * self.rows, (place + 1) * self.rows) for place in range(len(self.weight_amax))}
        return {place: span for place, span in spans.items() if self.weight_amax[place] is None}

    def measured(self, row_absmax: Mapping[int, Tensor]) -> "Quantized":
        """With the absmax of each row of the unmeasured spans, fp32 [rows], over all ranks."""
        reduced = {place: self._reduced(found) for place, found in row_absmax.items()}
        return replace(self, weight_amax=tuple(reduced.get(i, amax) for i, amax in enumerate(self.weight_amax)))

    def absmax_of_rows(self, start: int, stop: int) -> Tensor:
        """Of flat rows [start, stop): fp32 0-dim, or [stop - start] when the format has a scale for each row."""
        places = range(start // self.rows, -(-stop // self.rows))
        found = [self.weight_amax[place] for place in places]
        known = [amax for amax in found if amax is not None]
        assert known and len(known) == len(found), f"the absmax of {self.weight} was not measured"
        if not FORMATS[self.format].per_row:
            return torch.stack(known).max()
        first = places.start * self.rows
        return torch.cat(known)[start - first : stop - first]

    def _reduced(self, row_absmax: Tensor) -> Tensor:
        values = row_absmax.to(device="cpu", dtype=torch.float32)
        return values if FORMATS[self.format].per_row else values.max()


def read_quantized(
    model: nn.Module, sources: Mapping[str, str], is_modelopt_qlora: bool = False
) -> dict[str, Quantized]:
    """Every weight to be coded, by its name in the checkpoint, as in memory. Each rank for itself.

    Weights that are packed already are not among them.

    Args:
        sources: name in the checkpoint, as in memory -> key of the state.

    Raises:
        UserError: a format cannot be written from float weights here, or an absmax does not fit; names the weight.
    """
    names = {key: name for name, key in sources.items()}
    found: dict[str, Quantized] = {}
    for site in sites(model, is_modelopt_qlora):
        if site.format is None:
            continue
        if site.key not in names:
            raise UserError(
                f"{site.key} has an enabled quantizer, but the model's state has no tensor of that name; export the "
                "model without wrappers that change names (such as activation checkpointing)"
            )
        if is_packed(site.weight):
            _refuse_without_scale(site, names)
        elif shares_weight(model, site):
            log.warning("%s is an embedding whose weight is shared: it is written as it is, not quantized", site.key)
        else:
            found[names[site.key]] = _read(site, names[site.key])
    return _with_unseen_inputs(found)


def share_amax(quantized: Mapping[str, Quantized], aliases: Mapping[str, str]) -> dict[str, Quantized]:
    """Let those that engines load as one share absmax values: the largest. Pure; every absmax of a weight is known.

    Formats with groups: layers that read the same input share the absmax of weight and input. All formats: gate and
    up projection of an expert share that of the weight, row by row where rows have one. Tied weights share that of
    the input.

    Args:
        aliases: tied weights, alias -> canonical.

    Raises:
        UserError: layers that share are in several formats, or tied weights have several absmax values.
    """
    shared = dict(quantized)
    for group in _same_input(shared):
        if any(FORMATS[shared[name].format].in_groups for name in group):
            _refuse_several_formats([shared[name] for name in group])
            _share(shared, group, weights=True, inputs=True)
        elif all(expert_of(name.removesuffix(".weight")) for name in group):
            alike = len({(shared[name].format, shared[name].rows) for name in group}) == 1
            _share(shared, group, weights=alike, inputs=False)
    for alias, canonical in aliases.items():
        if alias in shared and canonical in shared:
            _refuse_unequal_tie(shared[alias], shared[canonical])
            _share(shared, (alias, canonical), weights=False, inputs=True)
    for name, one in shared.items():
        if one.input_amax is not None and one.input_amax == 0:
            log.warning("%s saw no input but zeros in calibration; its input scale is that of a full range", name)
    return shared


def _read(site: Site, name: str) -> Quantized:
    form = site.format
    assert form is not None
    if form.id not in FORMATS:
        raise UserError(
            f"{site.key} is quantized as {form.id}, which cannot be written from a float weight; "
            f"{', '.join(FORMATS)} can, and any format that nvidia-modelopt has packed already"
        )
    shape, parts = tuple(site.weight.shape), len(site.quantizers)
    if len(shape) != (3 if site.weight_name != "weight" else 2) or (len(shape) == 3 and parts != shape[0]):
        raise UserError(
            f"{site.key} of shape {list(shape)} has {parts} quantizers; a 2-D weight with one can be coded, "
            "and a fused 3-D weight [experts, out, in] with one for each expert"
        )
    amax = tuple(_weight_amax(site, place, shape[-2], form.id) for place in range(parts))
    if parts > 1 and any(value is None for value in amax):
        log.warning("%s: calibration did not reach every expert; these get the absmax of their weight", site.key)
    return Quantized(name, form.id, form.group_size, shape[-2], amax, _input_amax(site, form.id))


def _weight_amax(site: Site, place: int, rows: int, form: str) -> Tensor | None:
    """fp32, 0-dim or [rows]; None when the quantizer has none, or one of zeros: then calibration did not reach it."""
    quantizer, where = site.quantizers[place], _where(site, place)
    if any(getattr(quantizer, leaf, None) is not None for leaf in ("_global_amax", "global_amax")):
        raise UserError(
            f"the quantizer of {where} is static: it has an absmax for each block, which cannot be coded here; "
            "export with nvidia-modelopt, or quantize with a preset of dynamic blocks"
        )
    amax = getattr(quantizer, "_amax", None)
    if amax is None:
        return None
    value = _guarded(where, replicated_value(f"the absmax of {where}", amax)).reshape(-1)
    per_row = FORMATS[form].per_row
    if value.numel() != (rows if per_row else 1) and not (per_row and value.numel() == 1):
        raise UserError(
            f"the absmax of {where} has shape {list(amax.shape)}, but {form} needs "
            f"{f'one for each of {rows} rows' if per_row else 'one value'}; gather it on every rank, or use a preset "
            "of dynamic blocks"
        )
    if not value.any() or (per_row and value.numel() < rows):
        return None
    return value if per_row else value[0]


def _input_amax(site: Site, form: str) -> Tensor | None:
    """fp32 0-dim; None when the format has no static input scale, or the quantizer none."""
    inputs, where = site.inputs, f"the inputs of {site.key}"
    if FORMATS[form].input_scale is None or inputs is None or not inputs.is_enabled:
        return None
    amax = getattr(inputs, "_amax", None)
    if amax is not None:
        value = _guarded(where, replicated_value(f"the absmax of {where}", amax))
        if value.numel() != 1:
            raise UserError(f"the absmax of {where} has shape {list(amax.shape)}; {form} needs one value")
        return value.reshape(())
    if getattr(inputs, "_dynamic", False) or getattr(inputs, "_use_constant_amax", False):
        return None
    if len(site.weight.shape) == 3:  # all experts share this quantizer
        log.warning("%s: calibration reached no expert; their input absmax is set to %s", site.key, UNSEEN_INPUT)
        return torch.tensor(UNSEEN_INPUT)
    if expert_of(site.module) is None:
        log.warning("%s has no absmax: no input scale is written, which engines may not accept", where)
        return None
    return torch.zeros(())  # of an expert: see _with_unseen_inputs


def _guarded(where: str, value: Tensor) -> Tensor:
    """NaN counts as unseen, which is 0.

    Raises:
        UserError: infinite or negative.
    """
    if torch.isinf(value).any() or (value < 0).any():
        raise UserError(f"the absmax of {where} is infinite or negative; calibrate again, with finite activations")
    if value.isnan().any():
        log.warning("the absmax of %s has NaN, which is taken for unseen", where)
    return value.nan_to_num(nan=0.0)


def _with_unseen_inputs(found: Mapping[str, Quantized]) -> dict[str, Quantized]:
    """An expert that saw no token gets the largest input absmax among the experts beside it."""
    siblings: dict[tuple[str, str], list[Quantized]] = defaultdict(list)
    for one in found.values():
        expert = expert_of(one.weight.removesuffix(".weight"))
        if expert and one.input_amax is not None:
            siblings[expert.block, expert.leaf].append(one)
    filled = dict(found)
    for (block, leaf), experts in siblings.items():
        largest = torch.stack([one.input_amax for one in experts if one.input_amax is not None]).max()
        if largest == 0:
            largest = torch.tensor(UNSEEN_INPUT)
        unseen = [one for one in experts if one.input_amax == 0]
        for one in unseen:
            filled[one.weight] = replace(one, input_amax=largest)
        if unseen:
            log.warning(
                "calibration did not reach %d of %d experts (%s.*.%s); their input absmax is set to %.6g",
                len(unseen), len(experts), block, leaf, largest.item(),
            )  # fmt: skip
    return filled


def _same_input(names: Iterable[str]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in names:
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        for index, leaves in enumerate(SAME_INPUT):
            if leaf in leaves:
                groups[parent, index].append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _share(shared: dict[str, Quantized], group: Iterable[str], *, weights: bool, inputs: bool) -> None:
    """In place: each of the group gets the largest."""
    members = [shared[name] for name in group]
    changes: dict[str, Any] = {}
    if weights:
        stacks = zip(*(one.weight_amax for one in members), strict=True)
        changes["weight_amax"] = tuple(torch.stack([a for a in amax if a is not None]).amax(0) for amax in stacks)
    seen = [one.input_amax for one in members if one.input_amax is not None]
    if inputs and seen:
        changes["input_amax"] = torch.stack(seen).max()
    for one in members:
        shared[one.weight] = replace(one, **changes)


def _refuse_several_formats(members: list[Quantized]) -> None:
    kinds = {(one.format, one.group_size) for one in members}
    if len(kinds) > 1:
        what = ", ".join(f"{one.weight} is {one.format} {one.group_size}" for one in members)
        raise UserError(f"{what}: they read the same input and engines load them as one; quantize all of them alike")


def _refuse_unequal_tie(alias: Quantized, canonical: Quantized) -> None:
    pairs = zip(alias.weight_amax, canonical.weight_amax, strict=True)
    if not all(torch.equal(one, other) for one, other in pairs if one is not None and other is not None):
        raise UserError(
            f"{alias.weight} and {canonical.weight} are tied but have several absmax values, so their codes would "
            "differ; calibrate them alike or untie them"
        )


def _refuse_without_scale(site: Site, names: Mapping[str, str]) -> None:
    prefix = f"{site.module}." if site.weight_name == "weight" else f"{site.key}_"
    if f"{prefix}weight_scale" not in names:
        raise UserError(
            f"{site.key} is compressed, but {prefix}weight_scale is not in the model's state; export a model that "
            "nvidia-modelopt has packed for a checkpoint, or one with float weights"
        )


def _where(site: Site, place: int) -> str:
    return site.key if len(site.quantizers) == 1 else f"{site.key}[{place}]"
