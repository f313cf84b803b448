"""Which linear layers share one smoothing, and which tensor before them can take up its inverse. Pure, torch-free.

Smoothing multiplies the columns of a weight, so whatever makes the inputs must be divided by as much: a norm's weight
and bias, or the rows of the linear layer before. Where neither can, the checkpoint keeps a vector (pre_quant_scale)
or the layer is not smoothed. Decided by structure and tables from names and shapes on disk. That a fold is right for
the model at hand is checked when it is made: the layer's outputs must stay.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from distribute.layers import FUSED_LEAVES, KV_LEAVES, expert_of, natural_key
from distribute.scheme import Dialect, Scheme

#: Norms by what reads them. Of several that a layer has, the first is the one right before.
ATTENTION_NORMS = ("input_layernorm", "attention_norm", "ln_1")
MLP_NORMS = ("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "ffn_norm", "ln_2")
#: A layer with the norm on the left has the one on the right before its MLP, or none.
ONLY_WITH = {"post_feedforward_layernorm": "pre_feedforward_layernorm"}
#: Leaves of the layers that write an attention's output, and an MLP's.
OUTPUT_LEAVES = ("o_proj", "out_proj", "dense", "wo")
DOWN_LEAVES = ("down_proj", "w2")
#: Consumer: (producer, what must stand beside). Each channel of the consumer's input is one of the producer's output
#: times something; without a gate there is an activation between the two.
LINEAR_PAIRS = {"o_proj": ("v_proj", "q_proj"), "down_proj": ("up_proj", "gate_proj"), "w2": ("w3", "w1")}
VALUE_LEAF = "v_proj"
#: Norms inside an attention that do not lie between values and output.
INNER_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "q_a_layernorm", "kv_a_layernorm")
_LAYER = re.compile(r"^(?P<layer>.*?\.\d+)\.")

Kind = Literal["norm", "linear", "kept"]
#: Dialects whose checkpoints can hold a vector that multiplies a layer's inputs.
KEEPING: tuple[Dialect, ...] = ("modelopt",)


@dataclass(frozen=True)
class Fold:
    """Linear layers (names on disk) that are smoothed by one vector.

    `producer`: the norm or linear module that takes up the inverse; "" where nothing can (`kind` is "kept").
    `absorbing`: names of the tensors that take it up whole: a norm's weight and bias, a linear layer's bias.
    """

    consumers: tuple[str, ...]
    kind: Kind
    producer: str = ""
    absorbing: tuple[str, ...] = ()


def plan_folds(
    schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]], dialect: Dialect, *, kv_cache: bool = False
) -> list[Fold]:
    """The folds of all modules that are smoothed, as a dialect has them; of those "kept", see `KEEPING`.

    The modelopt dialect follows nvidia-modelopt 0.47 (export/unified_export_hf.py): AWQ goes into norms, that of
    NVFP4 also into linear layers; SmoothQuant stays; the experts of a block share a vector. Values that a K/V cache
    has scales for are left alone.
    """
    found: list[Fold] = []
    policies: dict[tuple[bool, bool], list[str]] = defaultdict(list)
    for module, scheme in schemes.items():
        if scheme.smooths:
            keeps = dialect in KEEPING
            norms = not keeps or scheme.algorithm.name == "awq"
            policies[norms, not keeps or (norms and scheme.weights.format == "nvfp4")].append(module)
    for (norms, linears), modules in policies.items():
        found += folds(
            modules,
            shapes,
            into_norms=norms,
            into_linears=linears,
            into_values=not kv_cache,
            experts_together=dialect in KEEPING,
        )
    return found


def folds(
    modules: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    into_norms: bool = True,
    into_linears: bool = True,
    into_values: bool = True,
    experts_together: bool = False,
) -> list[Fold]:
    """The folds of `modules` (linear layers that are to be smoothed), each in exactly one, in natural order.

    Args:
        shapes: of every tensor on disk, by name.
        into_norms: norms may take up a smoothing.
        into_linears: rows of linear layers that are in `modules` may.
        into_values: the layers that make values are among these.
        experts_together: the experts of a block that keep a vector share it, as engines read one for all.
    """
    structure = _Structure(frozenset(modules), shapes)
    found: list[Fold] = []
    for group in input_groups(modules):
        norm = structure.norm_of(group) if into_norms else ""
        linear = structure.linear_before(group) if into_linears and not norm else ""
        if linear.endswith(VALUE_LEAF) and not into_values:
            linear = ""
        tensors = [f"{norm}.weight", f"{norm}.bias"] if norm else [f"{linear}.bias"] if linear else []
        absorbing = tuple(name for name in tensors if name in shapes)
        kind: Kind = "norm" if norm else "linear" if linear else "kept"
        found.append(Fold(group, kind, norm or linear, absorbing))
    return _joined(found) if experts_together else found


def input_groups(modules: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Modules that read one input: those of one parent that runtimes fuse; every other one alone."""
    members: dict[tuple[str, object], list[str]] = defaultdict(list)
    for module in sorted(modules, key=natural_key):
        parent, _, leaf = module.rpartition(".")
        family = next((leaves for leaves in FUSED_LEAVES if leaf in leaves), leaf)
        members[parent, family].append(module)
    return map(tuple, members.values())


def layer_of(name: str) -> str:
    """The numbered part of the model that a tensor or module lies in ("model.layers.3"); "" outside of any."""
    found = _LAYER.match(name)
    return found["layer"] if found else ""


class _Structure:
    """Who reads what, by names and shapes."""

    def __init__(self, modules: frozenset[str], shapes: Mapping[str, tuple[int, ...]]):
        self._modules = modules
        self._shapes = shapes
        self._matrices: dict[str, set[str]] = defaultdict(set)  # layer -> modules with more than vectors
        self._children: dict[str, set[str]] = defaultdict(set)  # parent -> leaves
        self._attentions: set[str] = set()
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            parent, _, leaf = module.rpartition(".")
            self._children[parent].add(leaf)
            if len(shape) > 1:
                self._matrices[layer_of(name)].add(module)
            if leaf in KV_LEAVES:
                self._attentions.add(parent)

    def norm_of(self, group: tuple[str, ...]) -> str:
        """The norm whose output goes to all of `group` and nowhere else; "" when there is none, or none is known."""
        parent, _, leaf = group[0].rpartition(".")
        layer, is_attention = layer_of(group[0]), parent in self._attentions
        outputs = OUTPUT_LEAVES if is_attention else DOWN_LEAVES
        norms = {names: self._norm(layer, names) for names in (ATTENTION_NORMS, MLP_NORMS)}
        if parent.rpartition(".")[0] != layer or leaf in outputs or not all(norms.values()):
            return ""  # with one norm for both, or an order that the tables do not know, others read it too
        if is_attention:
            readers = {m for m in self._matrices[layer] if m.startswith(f"{parent}.")}
        else:
            readers = {m for m in self._matrices[layer] if not any(m.startswith(f"{a}.") for a in self._attentions)}
        readers -= {f"{parent}.{name}" for name in outputs}
        return norms[ATTENTION_NORMS if is_attention else MLP_NORMS] if readers == set(group) else ""

    def linear_before(self, group: tuple[str, ...]) -> str:
        """The linear layer whose rows are the columns of the one in `group`; "" when there is none."""
        parent, _, leaf = group[0].rpartition(".")
        before, beside = LINEAR_PAIRS.get(leaf, ("", ""))
        producer, children = f"{parent}.{before}", self._children[parent]
        if len(group) > 1 or producer not in self._modules or beside not in children:
            return ""
        between = {child for child in children if self._is_norm(parent, child)} - set(INNER_NORMS)
        fits = self._shapes[f"{producer}.weight"][0] == self._shapes[f"{group[0]}.weight"][1]
        return producer if fits and not between else ""

    def _norm(self, layer: str, names: tuple[str, ...]) -> str:
        has = self._children[layer]
        if any(after in has and before not in has for after, before in ONLY_WITH.items()):
            return ""
        return next((f"{layer}.{name}" for name in names if name in has), "")

    def _is_norm(self, parent: str, child: str) -> bool:
        return len(self._shapes.get(f"{parent}.{child}.weight", (0, 0))) == 1


def _joined(found: Iterable[Fold]) -> list[Fold]:
    """The same with the experts of a block that keep a vector in one fold: those that read the block's input, and
    those that read what these made."""
    kept: dict[object, list[str]] = {}
    whole: list[Fold | object] = []
    for fold in found:
        expert = expert_of(fold.consumers[0])
        if fold.kind != "kept" or expert is None:
            whole.append(fold)
            continue
        key = (expert.block, expert.leaf in DOWN_LEAVES)
        if key not in kept:
            whole.append(key)
        kept.setdefault(key, []).extend(fold.consumers)
    return [fold if isinstance(fold, Fold) else Fold(tuple(kept[fold]), "kept") for fold in whole]
