"""What a dialect says about a checkpoint: tensors of a quantized linear layer, and who shares a scale. Torch-free."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal, Protocol

from distribute.layers import FUSED_LEAVES, Expert, expert_of, fused_siblings, natural_key
from distribute.scheme import Scheme
from distribute.source import HEAD_SUFFIXES

#: A set of modules that end up with one value; two or more names, in natural order.
Group = tuple[str, ...]

PRODUCER = {"name": "nogather", "version": version("nogather")}
#: Leaf names of the linear layers that read an expert's input; the others read what these produced.
_FIRST_LEAVES = {"gate_proj", "up_proj", "w1", "w3"}


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor of a quantized linear layer: `<module>.<suffix>`; dtype as safetensors names it.

    `per`: how many rows of the weight one row of this tensor is made of, when it is coded row by row; 0 when it is a
    value of the whole weight, known before the export.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    per: int = 0


@dataclass(frozen=True)
class KvSpec:
    """One stored scale of a K/V cache. `module`: under the attention module, "" for itself; `of`: "k" or "v"."""

    module: str
    suffix: str
    dtype: str
    shape: tuple[int, ...]
    of: Literal["k", "v"]


@dataclass(frozen=True)
class ShareGroups:
    """Which modules take the largest absmax among them.

    `weight`: of the whole weight, before the scale is computed (scales of whole weights only).
    `input`: of the inputs.
    `input_fallback`: of the inputs, but only for a member that saw none (an expert that no token was routed to).
    """

    weight: tuple[Group, ...] = ()
    input: tuple[Group, ...] = ()
    input_fallback: tuple[Group, ...] = ()


class Dialect(Protocol):
    """A module in this package that speaks one dialect; see `distribute.dialects.table`."""

    def codec(self, scheme: Scheme) -> str:
        """Key for `distribute.numerics.table.find_codec`."""

    def tensors(
        self, shape: tuple[int, int], scheme: Scheme, model_dtype: str, *, smoothed: bool = False
    ) -> tuple[TensorSpec, ...]:
        """Stored tensors of a quantized linear layer with weight (out, in); `model_dtype` as in "BF16".

        `smoothed`: its inputs are multiplied by a vector that no layer before it could take.
        """

    def share_groups(self, schemes: Mapping[str, Scheme]) -> ShareGroups:
        """Who shares a scale among the quantized modules (names on disk)."""

    def kv_tensors(self, kv_cache: str, model_dtype: str) -> tuple[KvSpec, ...]:
        """Stored scales of an attention module's K/V cache in the given format."""

    def quantization_config(
        self,
        quantized: Mapping[str, Scheme],
        kept: Iterable[str],
        *,
        kv_cache: str | None = None,
        embeddings: Iterable[str] = (),
    ) -> dict[str, Any]:
        """The `quantization_config` block of config.json. `kept`: unquantized linear layers and routers."""

    def extra_files(
        self,
        quantized: Mapping[str, Scheme],
        kept: Iterable[str],
        *,
        kv_cache: str | None = None,
        embeddings: Iterable[str] = (),
    ) -> dict[str, dict[str, Any]]:
        """Further JSON files by name, each to be written with `indent=4`."""


def implied_modules(tensors: Iterable[str]) -> frozenset[str]:
    """Linear layers that a loader builds although no tensor of theirs is stored: the head of tied embeddings.

    Decided by what is stored: a config.json may leave the flag to the default of its model class.
    """
    return frozenset() if any(name.endswith(HEAD_SUFFIXES) for name in tensors) else frozenset({"lm_head"})


def expert_input_groups(modules: Iterable[str]) -> tuple[Group, ...]:
    """Per experts block: all layers that read the block's input; and all that read the experts' hidden state."""
    groups: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for module, expert in _experts(modules):
        groups[expert.block, expert.leaf in _FIRST_LEAVES].append(module)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def expert_gate_up_groups(modules: Iterable[str]) -> tuple[Group, ...]:
    """The gate and up projection of every expert: (w1, w3) or (gate_proj, up_proj)."""
    groups: dict[tuple[str, int, tuple[str, ...]], list[str]] = defaultdict(list)
    for module, expert in _experts(modules):
        for leaves in FUSED_LEAVES:
            if expert.leaf in leaves:
                groups[expert.block, expert.index, leaves].append(module)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def same_input_groups(modules: Iterable[str]) -> tuple[Group, ...]:
    """Linear layers that engines load as one matrix, and so read one input: q/k/v, gate/up, w1/w3 of one expert."""
    return tuple(fused_siblings(modules))


def _experts(modules: Iterable[str]) -> list[tuple[str, Expert]]:
    return [(name, expert) for name in sorted(modules, key=natural_key) if (expert := expert_of(name))]
