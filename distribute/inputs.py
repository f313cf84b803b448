"""The inputs of linear layers and of routed experts, seen while a model runs.

Linear layers are seen by forward pre-hooks. transformers 5 keeps the experts of a block in 3-D parameters, so
there is no module to hook: their own loop (experts implementation "eager") calls F.linear with one expert's slice,
and the slice's place in its parameter tells which expert it is. This is the point where nvidia-modelopt's expert
quantizers stand, so the maximum over a block's experts is its shared input amax, bit for bit.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from distribute.modules import Projection
from distribute.numerics.observers import absmax


class Observer(Protocol):
    """What `watching` tells about inputs."""

    def see(self, names: tuple[str, ...], x: Tensor) -> None:
        """`x` [..., in] is an input of every layer in `names`."""
        ...

    def count(self, names: tuple[str, ...], rows: int) -> None:
        """So many rows were given to every layer in `names`."""
        ...


class InputStatistics:
    """Running absmax and number of rows of inputs, by name; with `channels`, the absmax of every channel instead.

    `see` takes an input with [..., in] elements. Linear layers that share an input are called one after the
    other with the same tensor object; it is then measured once.
    """

    def __init__(self, *, channels: bool = False) -> None:
        self.rows: dict[str, int] = {}
        self._measured = channels_absmax if channels else absmax
        self._absmax: dict[str, Tensor] = {}  # 0-dim, or [in]
        self._last: tuple[Tensor, Tensor] | None = None

    def see(self, names: tuple[str, ...], x: Tensor) -> None:
        """`x` is an input of every layer in `names`."""
        if x.numel() == 0:
            return
        value = self._measure(x)
        for name in names:
            known = self._absmax.get(name)
            self._absmax[name] = value if known is None else torch.maximum(known, value)

    def count(self, names: tuple[str, ...], rows: int) -> None:
        """So many rows were given to every layer in `names`."""
        for name in names:
            self.rows[name] = self.rows.get(name, 0) + rows

    def finish(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By name, in the order first seen: absmax fp32 0-dim, and [in] with `channels`, else {}; on the CPU."""
        self._last = None
        if not self._absmax:
            return {}, {}
        values = torch.stack([value.amax() for value in self._absmax.values()]).cpu()
        channels = {name: value.cpu() for name, value in self._absmax.items() if value.dim()}
        return dict(zip(self._absmax, values.unbind(), strict=True)), channels

    def _measure(self, x: Tensor) -> Tensor:
        # The reference keeps the tensor alive, so that its identity cannot be taken over by another one.
        if self._last is None or self._last[0] is not x:
            self._last = (x, self._measured(x))
        return self._last[1]


def channels_absmax(x: Tensor) -> Tensor:
    """Largest magnitude of every channel of x [..., in]: fp32 [in]; NaN wins."""
    rows = x.reshape(-1, x.shape[-1])
    low, high = rows.amin(dim=0), rows.amax(dim=0)
    return torch.maximum(low.abs(), high.abs()).to(torch.float32)


@contextmanager
def watching(
    model: nn.Module, projections: Iterable[Projection], statistics: Observer, *, all_experts: bool = False
) -> Iterator[None]:
    """While open, every input of these projections goes to `statistics` under the module name on disk.

    `all_experts`: every expert of a block is seen with every token that the block gets, but counts those that are
    routed to it; what the block returns stays that of the router.
    """
    linears: dict[str, list[str]] = defaultdict(list)
    experts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for projection in projections:
        if projection.expert is None:
            linears[projection.parameter].append(projection.module)
        else:
            experts[projection.parameter][projection.expert].append(projection.module)
    handles = [
        _hook(model.get_submodule(parameter.rpartition(".")[0]), tuple(names), statistics)
        for parameter, names in linears.items()
    ]
    slices = {model.get_parameter(parameter): by_index for parameter, by_index in experts.items()}
    mode = _ExpertInputs(slices, statistics)
    if all_experts:
        blocks = {model.get_submodule(p.rpartition(".")[0]): len(model.get_parameter(p)) for p in experts}
        handles += [b.register_forward_pre_hook(partial(mode.before, count)) for b, count in blocks.items()]
    try:
        with mode if slices else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(linear: nn.Module, names: tuple[str, ...], statistics: Observer) -> Any:
    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        statistics.see(names, x)
        statistics.count(names, x.numel() // x.shape[-1])

    return linear.register_forward_pre_hook(see, with_kwargs=True)


class _ExpertInputs(TorchFunctionMode):
    """Sees each F.linear whose weight is a slice of one of the given 3-D parameters."""

    def __init__(self, slices: dict[nn.Parameter, dict[int, list[str]]], statistics: Observer):
        super().__init__()
        self.sees, self.counts = True, True
        self._statistics = statistics
        self._names = {
            _address(parameter): (
                parameter.storage_offset(),
                parameter.stride(0),
                {index: tuple(names) for index, names in by_index.items()},
            )
            for parameter, by_index in slices.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            self._see(*args[:2])
        return func(*args, **(kwargs or {}))

    def _see(self, x: Tensor, weight: Tensor) -> None:
        found = self._names.get(_address(weight))
        if found is not None and weight.dim() == 2:
            offset, stride, names = found
            index = (weight.storage_offset() - offset) // stride
            if self.sees:
                self._statistics.see(names.get(index, ()), x)
            if self.counts:
                self._statistics.count(names.get(index, ()), x.numel() // x.shape[-1])

    def before(self, count: int, block: nn.Module, args: tuple[Any, ...]) -> None:
        """Run a block of `count` experts with all its tokens given to all of them, and look at what they get.

        transformers' interface: a block gets tokens [n, hidden], the experts chosen [n, k] and their weights [n, k].
        """
        hidden, chosen, weights = args[:3]
        everyone = torch.arange(count, device=chosen.device).expand(len(hidden), -1)
        self.sees, self.counts = True, False
        try:
            block.forward(hidden, everyone, weights.new_zeros(everyone.shape))
        finally:
            self.sees, self.counts = False, True


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
