"""Run a language model decoder layer by decoder layer, with one layer's weights in memory at a time.

Owns how a model is taken apart: one pass with the layers replaced by stand-ins gives the first hidden states and
the arguments that each layer gets; then each layer is loaded, run for all batches and released. Hidden states are
those of a plain forward, bit for bit. The output head never runs. Knows no ranks; the caller deals out batches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from distribute.decoder import RETURNS, Call, CannotSplitError, capture, layer_lists, owner_of
from distribute.errors import SourceError
from distribute.job import Progress
from distribute.modules import Modules, Projection
from distribute.source import Checkpoint

#: Called with the projections of the part that runs next; the batches run inside the context it returns.
Around = Callable[[nn.Module, list[Projection]], AbstractContextManager[Any]]


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
        with _computing(self._threads):
            if self.layerwise:
                return self._run_layers(batches, around, progress)
            return self._run_whole(batches, around, progress)

    def _run_layers(self, batches: Sequence[Tensor], around: Around, progress: Progress | None) -> list[Tensor]:
        captured = [self._capture(batch) for batch in batches]
        hidden = [first for first, _ in captured]
        calls = [per_layer for _, per_layer in captured]
        for index, layer in enumerate(self._layers):
            names = self._modules.parameters_under(f"{self._layers_path}.{index}")
            self._modules.load(names)
            with around(self.model, self._projections_of(names)):
                for at, batch in enumerate(batches):
                    call = calls[at][index]
                    output = layer(hidden[at], *call.args, **call.kwargs)
                    hidden[at] = output if isinstance(output, Tensor) else output[0]
                    _advance(progress, batch)
            self._modules.release(names)
        return hidden

    def _run_whole(self, batches: Sequence[Tensor], around: Around, progress: Progress | None) -> list[Tensor]:
        whole = self._modules.whole()
        decoder = whole.get_submodule(self._decoder_path)
        hidden = []
        with around(whole, self._inside()):
            for batch in batches:
                output = decoder(input_ids=batch.to(self._modules.device), use_cache=False)
                hidden.append(output[0])
                _advance(progress, batch)
        return hidden

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
                    with _computing(self._threads):
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


def _advance(progress: Progress | None, batch: Tensor) -> None:
    if progress is not None:
        progress.advance(batch.numel())


@contextmanager
def _computing(threads: int) -> Iterator[None]:
    """Inference with a fixed number of CPU threads, since matrix kernels may sum in another order with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
