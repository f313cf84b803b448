"""The layers of a decoder: where they are, and what each of them is called with.

Owns the test whether a model is a plain sequence of layers, which is made by running it with stand-ins that hand
on what they get. Knows no weights and loads nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

#: What decoder layers return around their hidden states; their callers unpack it.
RETURNS: tuple[Callable[[Tensor], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
)


class CannotSplitError(Exception):
    """The decoder is not a plain sequence of layers."""


@dataclass(frozen=True)
class Call:
    """What a layer gets besides the hidden states. Tensors are shared between layers, not copied."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def layer_lists(model: Any) -> list[str]:
    """Paths, from the model, of the lists in its text decoder that are as long as it has layers."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    inside = set(model.get_decoder().modules())
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and module in inside and len(module) == count
    ]


def owner_of(model: nn.Module, path: str) -> str:
    """Path of the innermost transformers model around a module: its forward calls the layers, and no head."""
    while path and not isinstance(model.get_submodule(path), PreTrainedModel):
        path = path.rpartition(".")[0]
    return path


def capture(
    decoder: nn.Module, layers: Sequence[nn.Module], input_ids: Tensor, *, returns: Callable[[Tensor], Any]
) -> tuple[Tensor, list[Call]]:
    """First hidden states [n, len, hidden] and every layer's arguments, without running a layer.

    `input_ids` is [n, len] int64; `returns` is one of RETURNS.

    Raises:
        CannotSplitError: the decoder does anything else with hidden states than hand them from layer to layer.
    """
    recorder = _Recorder(returns)
    for index, layer in enumerate(layers):
        layer.forward = recorder.stand_in(index)
    try:
        output = decoder(input_ids=input_ids, use_cache=False)
    except CannotSplitError:
        raise
    except Exception as error:  # whatever a forward may do with an output that is not what it expects
        raise CannotSplitError(f"its forward needs what its layers return: {error}") from error
    finally:
        for layer in layers:
            del layer.forward
    return recorder.finish(len(layers), output)


class _Recorder:
    """Stand-ins for layers. They are seen in sequence with the same untouched tensor, or the model is refused."""

    def __init__(self, returns: Callable[[Tensor], Any]):
        self._returns = returns
        self._calls: list[Call] = []
        self._hidden: Tensor | None = None
        self._version = 0

    def stand_in(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            if self._hidden is None:
                self._hidden, self._version = hidden, hidden._version
            if index != len(self._calls) or not self._is_untouched(hidden):
                raise CannotSplitError("it does more between its layers than hand on hidden states")
            self._calls.append(Call(rest, kwargs))
            return self._returns(hidden)

        return forward

    def finish(self, num_layers: int, output: Any) -> tuple[Tensor, list[Call]]:
        if self._hidden is None or len(self._calls) != num_layers or output[0].shape != self._hidden.shape:
            raise CannotSplitError("it does not call its layers in sequence")
        return self._hidden, self._calls

    def _is_untouched(self, hidden: Tensor) -> bool:
        """The first layer's tensor, or a view of all of it, with no write to it since."""
        first = self._hidden
        assert first is not None
        return hidden._version == self._version and _extent(hidden) == _extent(first)


def _extent(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
