"""Run a language model decoder layer by decoder layer, with one layer's weights in memory at a time.

Owns how a model is taken apart: one pass with the layers replaced by stand-ins gives the first hidden states and
the arguments that each layer gets; then each layer is loaded, run for all batches and released. Hidden states are
those of a plain forward, bit for bit. The output head never runs. Knows no ranks; the caller deals out batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from distribute.decoder import RETURNS, Call, CannotSplitError, capture, layer_lists, owner_of
from distribute.errors import SourceError
from distribute.job import Progress
from distribute.modules import Modules, Projection
from distribute.source import Checkpoint

#: Called with the projections of the part that runs next; the batches run inside the context it returns.
Around = Callable[[nn.Module, list[Projection]], AbstractContextManager[Any]]


class States(Protocol):
    """Hidden states [n, len, hidden] by batch: a list, or something that keeps them elsewhere."""

    def __getitem__(self, index: int) -> Tensor: ...
    def __setitem__(self, index: int, tensor: Tensor) -> None: ...
    def append(self, tensor: Tensor) -> None: ...


@dataclass(frozen=True)
class Part:
    """What runs at once, with its weights loaded: a decoder layer, or the model as a whole."""

    path: str  # in memory; "" for the whole
    model: nn.Module
    projections: list[Projection]
    _batches: Sequence[Tensor]
    _states: States
    _forward: Callable[[int, Tensor], Tensor]
    _load: Callable[[Mapping[str, Tensor]], None]
    _parameter_of: Callable[[str], str]
    _threads: int

    def output(self, index: int, hidden: Tensor) -> Tensor:
        """What it makes of hidden states of one batch, called as for that batch."""
        with computing(self._threads):
            return self._forward(index, hidden)

    def input(self, index: int) -> Tensor:
        """The hidden states of one batch."""
        return self._states[index]

    def run(self, progress: Progress | None = None, *, advance: bool = True) -> None:
        """Run all batches. `advance`: their hidden states become those after this part."""
        for index, batch in enumerate(self._batches):
            output = self.output(index, self._states[index])
            if advance:
                self._states[index] = output
            if progress is not None:
                progress.advance(batch.numel())

    def owner_of(self, tensor: str) -> nn.Module:
        """The module that a tensor on disk is a parameter of."""
        return self.model.get_submodule(self._parameter_of(tensor).rpartition(".")[0])

    def change(self, tensors: Mapping[str, Tensor]) -> None:
        """In place: the weights are those on disk again but for `tensors`, by their names there."""
        self._load(tensors)


class LayerwiseModel:
    """A decoder that can be run layer by layer, or, when it cannot be taken apart, as a whole.

    Attributes: `layerwise` says which of the two; `warnings` hold one sentence each.
    """

    def __init__(self, modules: Modules, *, threads: int):
        self._modules = modules
        self._threads = threads
        self.warnings: list[str] = []
        self.layerwise = True
        self._decoder_path = _path_of(modules.model, modules.model.get_decoder())
        try:
            self._split()
        except CannotSplitError as reason:
            self.layerwise = False
            self.warnings.append(
                f"the model cannot be run layer by layer ({reason}); it is loaded as a whole, "
                "so each rank needs memory for all its weights"
            )

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        *,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        threads: int = 1,
    ) -> "LayerwiseModel":
        """Build the model without weights and load what lies outside the decoder layers.

        A CPU rank computes with `threads` threads.

        Raises:
            SourceError: transformers cannot build this model, or a weight is missing or misshapen.
        """
        return cls(Modules(checkpoint, device=device, trust_remote_code=trust_remote_code), threads=threads)

    @property
    def model(self) -> nn.Module:
        """The transformers model; outside `run` its decoder layers have no values."""
        return self._modules.model

    @property
    def num_parts(self) -> int:
        """How many parts run one after the other: decoder layers, or 1 for the model as a whole."""
        return len(self._layers) if self.layerwise else 1

    def linear_modules(self) -> set[str]:
        """Module names on disk of all matrices in decoder layers whose input can be observed."""
        return {projection.module for projection in self._inside()}

    def check(self, quantized: set[str]) -> None:
        """Raise SourceError for modules that should be quantized but are no linear layers of the decoder."""
        if missing := sorted(quantized - self.linear_modules()):
            raise SourceError(
                f"{len(missing)} modules should be quantized but are not linear layers of this model's decoder, "
                f"for example {', '.join(missing[:5])}; add them to the recipe's ignore list"
            )

    def run(self, batches: Sequence[Tensor], *, around: Around, progress: Progress | None = None) -> list[Tensor]:
        """Hidden states after the last layer, one [n, len, hidden] a batch of token ids [n, len] int64.

        All batches pass a part before the next part is loaded, inside `around(model, projections of the part)`.
        """
        if progress is not None:
            tokens = sum(batch.numel() for batch in batches)
            progress.start("calibrating", tokens * self.num_parts, "token layers")
        if not batches:
            return []
        states: list[Tensor] = []
        for part in self.parts(batches, states):
            with around(part.model, part.projections):
                part.run(progress)
        return states

    def parts(self, batches: Sequence[Tensor], states: States) -> Iterator[Part]:
        """Each part in turn, loaded; it is released when the next one is asked for.

        `states` is empty; it gets the hidden states of each batch. A layer's are those that the layer before left.
        """
        return self._layer_parts(batches, states) if self.layerwise else self._whole_part(batches, states)

    def _layer_parts(self, batches: Sequence[Tensor], states: States) -> Iterator[Part]:
        calls = []
        for batch in batches:
            with computing(self._threads):
                first, per_layer = self._capture(batch)
            states.append(first)
            calls.append(per_layer)
        for index, layer in enumerate(self._layers):
            path = f"{self._layers_path}.{index}"
            names = self._modules.parameters_under(path)
            self._modules.load(names)

            def forward(at: int, hidden: Tensor, layer: nn.Module = layer, index: int = index) -> Tensor:
                call = calls[at][index]
                output = layer(hidden, *call.args, **call.kwargs)
                return output if isinstance(output, Tensor) else output[0]

            load, find = partial(self._modules.load, names), self._modules.parameter_of
            yield Part(
                path, self.model, self._projections_of(names), batches, states, forward, load, find, self._threads
            )
            self._modules.release(names)

    def _whole_part(self, batches: Sequence[Tensor], states: States) -> Iterator[Part]:
        whole = self._modules.whole()
        decoder = whole.get_submodule(self._decoder_path)
        for batch in batches:
            states.append(batch)  # what the whole is given

        def forward(_: int, ids: Tensor) -> Tensor:
            output = decoder(input_ids=ids.to(self._modules.device), use_cache=False)
            return output[0]

        def load(_: Mapping[str, Tensor]) -> None:
            raise AssertionError("a model that runs as a whole keeps its weights")

        find = self._modules.parameter_of
        yield Part("", whole, self._inside(), batches, states, forward, load, find, self._threads)

    def _capture(self, batch: Tensor) -> tuple[Tensor, list[Call]]:
        return capture(self._decoder, self._layers, batch.to(self._modules.device), returns=self._returns)

    def _inside(self) -> list[Projection]:
        path = self._layers_path if self.layerwise else self._decoder_path
        prefix = f"{path}." if path else ""
        return [p for p in self._modules.projections if p.parameter.startswith(prefix)]

    def _projections_of(self, parameters: list[str]) -> list[Projection]:
        wanted = set(parameters)
        return [p for p in self._modules.projections if p.parameter in wanted]

    def _split(self) -> None:
        """Find the list of layers whose items a forward calls in sequence, and load all that is outside of it."""
        reasons = []
        for path in layer_lists(self.model):
            self._layers_path = path
            self._layers = list(self.model.get_submodule(path).children())
            self._decoder_path = owner_of(self.model, path)
            self._decoder = self.model.get_submodule(self._decoder_path)
            self._refuse_shared(path)
            self._load_outside()
            for self._returns in RETURNS:
                try:
                    with computing(self._threads):
                        self._capture(torch.zeros(1, 2, dtype=torch.int64))
                    return
                except CannotSplitError as error:
                    reasons.append(str(error))
        raise CannotSplitError(reasons[0] if reasons else "it has no list of num_hidden_layers modules")

    def _load_outside(self) -> None:
        inside = set(self._modules.parameters_under(self._layers_path))
        self._modules.load(name for name in self._modules.parameters_under(self._decoder_path) if name not in inside)
        self._modules.compute_buffers()

    def _refuse_shared(self, path: str) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", {})
        shared = [name for pair in tied.items() for name in pair if name.startswith(f"{path}.")]
        if shared:
            raise CannotSplitError(f"its layers share weights: {shared[0]}")


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


@contextmanager
def computing(threads: int) -> Iterator[None]:
    """Inference with a fixed number of CPU threads, since matrix kernels may sum in another order with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
