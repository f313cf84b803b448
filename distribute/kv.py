"""Keys (after rotation) and values as attention gets them, seen while a model runs: what a K/V cache holds.

transformers' models call attention by an interface, a table of functions by name. While `watching_kv` is open, the
functions in use are wrapped. Heads are seen before they are repeated for groups of queries, where nvidia-modelopt's
k_bmm and v_bmm quantizers stand, so the ranges are those, bit for bit.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distribute.layers import KV_LEAVES
from distribute.modules import Projection
from distribute.numerics.observers import absmax

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # how models import it
EAGER = "eager"
EAGER_FUNCTION = "eager_attention_forward"  # each model has its own, outside the table


class KeyValueStatistics:
    """Running absmax of keys and of values, by name of the attention module on disk."""

    def __init__(self) -> None:
        self._absmax: dict[str, Tensor] = {}  # fp32 [2]

    def see(self, name: str, keys: Tensor, values: Tensor) -> None:
        """`keys` and `values` [..., heads, len, head] that one attention got."""
        value = torch.stack([absmax(keys), absmax(values)])
        self._absmax[name] = torch.maximum(self._absmax.get(name, value), value)

    def finish(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(absmax of keys, absmax of values), fp32 0-dim on the CPU, by name."""
        return {name: (value[0], value[1]) for name, value in ((n, v.cpu()) for n, v in self._absmax.items())}


def attentions(projections: Iterable[Projection]) -> dict[str, str]:
    """Paths in memory of the modules that make keys and values, and their names on disk."""
    return {
        projection.parameter.rsplit(".", 2)[0]: projection.module.rpartition(".")[0]
        for projection in projections
        if projection.expert is None and projection.module.rpartition(".")[2] in KV_LEAVES
    }


@contextmanager
def watching_kv(
    model: nn.Module, projections: Iterable[Projection], statistics: KeyValueStatistics
) -> Iterator[None]:
    """While open, the keys and values of every attention of these projections go to `statistics`."""
    names = {model.get_submodule(path): name for path, name in attentions(projections).items()}
    tables = {(id(table), key): (table, key) for table, key in map(_entry, names) if table is not None}
    with ExitStack() as stack:
        for table, key in tables.values():
            stack.enter_context(_wrapped(table, key, names, statistics))
        yield


def _entry(attention: nn.Module) -> tuple[Any, str]:
    """The table of attention functions that a module looks into, None where it has none, and the key it looks for."""
    table = getattr(sys.modules[type(attention).__module__], INTERFACE, None)
    return table, getattr(getattr(attention, "config", None), "_attn_implementation", None) or EAGER


@contextmanager
def _wrapped(table: Any, key: str, names: dict[nn.Module, str], statistics: KeyValueStatistics) -> Iterator[None]:
    inner: Callable[..., Any] | None = table.get(key)

    def attend(module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module in names:
            statistics.see(names[module], keys, values)
        function = inner or getattr(sys.modules[type(module).__module__], EAGER_FUNCTION)
        return function(module, query, keys, values, *args, **kwargs)

    table[key] = attend  # of this table alone; `del` uncovers the entry that all tables share
    try:
        yield
    finally:
        del table[key]
        if table.get(key) is not inner:
            table[key] = inner
