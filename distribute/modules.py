"""A transformers model without weights, and its weights from the source files, part by part.

Owns the map between tensor names on disk and parameters in memory (fused experts, renamed prefixes), which is
transformers' own conversion mapping; this file alone touches the loader inside transformers (5.20 and later), so
that a part is loaded exactly as `from_pretrained` would load it. Never holds more than what `load` was asked for.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from distribute.errors import SourceError
from distribute.source import Checkpoint
from distribute.tensors import DTYPES, read_tensor

AUTO_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText)
#: The experts' own loop over F.linear: what nvidia-modelopt calibrates with, and where each input can be seen.
EXPERTS_IMPLEMENTATION = "eager"


@dataclass(frozen=True)
class Projection:
    """A matrix on disk whose input can be seen: `module` on disk lies in `parameter` in memory."""

    module: str
    parameter: str
    expert: int | None = None  # index along dim 0 of a 3-D parameter


class Modules:
    """The model on the meta device, with `load` and `release` for the weights of named parameters."""

    def __init__(self, checkpoint: Checkpoint, *, device: torch.device | str, trust_remote_code: bool = False):
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        config = _read_config(checkpoint, trust_remote_code)
        self._dtype = _model_dtype(checkpoint, config)
        self._options = {
            "dtype": self._dtype,
            "experts_implementation": EXPERTS_IMPLEMENTATION,
            "trust_remote_code": trust_remote_code,
        }
        self._auto, self.model = self._build(config)
        self.model.eval()
        self._mapping = get_model_conversion_mapping(self.model)
        self._sources: dict[str, list[str]] = defaultdict(list)  # parameter -> names on disk, natural order
        self.projections = self._map_names()

    def whole(self) -> nn.Module:
        """The same model with all its weights, for architectures that cannot be run layer by layer."""
        self.release([name for name, value in self.model.state_dict().items() if not value.is_meta])
        with _quiet():
            model: nn.Module = self._auto.from_pretrained(str(self.checkpoint.folder), **self._options)
        return model.to(self.device).eval()

    def parameter_of(self, tensor: str) -> str:
        """The parameter that a tensor on disk goes to."""
        return next(parameter for parameter, names in self._sources.items() if tensor in names)

    def parameters_under(self, prefix: str) -> list[str]:
        """Names of the parameters and persistent buffers below a module, in the model's order."""
        return [name for name in self.model.state_dict() if name.startswith(f"{prefix}." if prefix else "")]

    def load(self, parameters: Iterable[str], changed: Mapping[str, Tensor] | None = None) -> None:
        """In place: give these parameters their values from the source files, cast to the model's dtype.

        `changed` has other values for tensors on disk, by their names there.

        Raises:
            SourceError: a parameter is not in the source files, or has another shape there.
        """
        wanted = set(parameters)
        needed = wanted | self._stored_partners(wanted)
        names = [name for parameter in needed for name in self._sources.get(parameter, ())]
        config = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self._dtype,
            dtype_plan=self.model._get_dtype_plan(self._dtype),
            weight_mapping=list(self._mapping),  # type: ignore[arg-type]
        )
        lazy = {name: _Lazy(self.checkpoint, name, (changed or {}).get(name)) for name in dict.fromkeys(names)}
        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(
                model=self.model, state_dict=lazy, load_config=config, disk_offload_index=None
            )
        if needed - wanted:
            self.model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        self._refuse_damaged(info, wanted)

    def release(self, parameters: Iterable[str]) -> None:
        """In place: drop the values of these parameters; they are on the meta device again."""
        for name in parameters:
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            empty = torch.empty_like(getattr(owner, leaf), device="meta")
            setattr(owner, leaf, empty if leaf in owner._buffers else nn.Parameter(empty, requires_grad=False))

    def compute_buffers(self) -> None:
        """In place: compute what no file stores (rotary frequencies), as `from_pretrained` does."""
        for name, buffer in list(self.model.named_non_persistent_buffers()):
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, torch.empty_like(buffer, device=self.device))
        self.model.initialize_weights()

    def _build(self, config: Any) -> tuple[Any, PreTrainedModel]:
        """The auto class that knows this config, and its model without weights."""
        faults = []
        for auto in AUTO_CLASSES:
            try:
                with torch.device("meta"):
                    return auto, auto.from_config(config, **self._options)
            except Exception as error:  # whatever a config may provoke in transformers or in custom code
                faults.append(error)
        raise _cannot_build(self.checkpoint, faults[0])

    def _map_names(self) -> list[Projection]:
        """Fill `_sources`, by the rules of transformers' loader; returns the projections."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        targets = {pattern: entry.target_patterns for entry in converters for pattern in entry.source_patterns}
        prefix, state = self.model.base_model_prefix, self.model.state_dict()
        seen: dict[tuple[str, str], int] = defaultdict(int)
        projections = []
        # The loader's order: it decides which tensor becomes which expert.
        for name in sorted(self.checkpoint.tensors, key=dot_natural_key):
            parameter, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if parameter not in state and name in state:
                parameter, pattern = rename_source_key(name, [], [], prefix, state)
            if parameter not in state:
                continue  # vision towers of other classes, multi-token prediction: nothing here runs them
            first, *others = targets[pattern] if pattern is not None else ("",)
            for target in (first, *others):
                self._sources[parameter.replace(first, target) if target != first else parameter].append(name)
            index = seen[parameter, pattern or name]
            seen[parameter, pattern or name] += 1
            if projection := self._projection(name, parameter, index, state[parameter]):
                projections.append(projection)
        return projections

    def _projection(self, name: str, parameter: str, index: int, value: Tensor) -> Projection | None:
        module = name.removesuffix(".weight")
        if module == name or len(self.checkpoint.tensors[name].shape) != 2:
            return None
        if value.dim() == 3:
            return Projection(module, parameter, index)
        owner = self.model.get_submodule(parameter.rpartition(".")[0])
        return Projection(module, parameter) if isinstance(owner, nn.Linear) else None

    def _stored_partners(self, wanted: set[str]) -> set[str]:
        """Tied parameters that are stored in place of a wanted one that is not."""
        tied = self.model.all_tied_weights_keys
        return {
            alias
            for alias, original in tied.items()
            if original in wanted and original not in self._sources and alias in self._sources
        }

    def _refuse_damaged(self, info: Any, wanted: set[str]) -> None:
        if errors := sorted(set(info.conversion_errors) & wanted):
            reason = str(info.conversion_errors[errors[0]]).strip().splitlines()[-1]
            raise SourceError(f"{self.checkpoint.folder}: {errors[0]} cannot be read: {reason}")
        if shapes := sorted(fault for fault in info.mismatched_keys if fault[0] in wanted):
            name, stored, expected = shapes[0]
            sources = self._sources[name]
            shown = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
            raise SourceError(
                f"{self.checkpoint.folder}: {shown} make {name} of shape {list(stored)}, but config.json "
                f"asks for {list(expected)}; config.json and the weights must be of the same model"
            )
        optional = self.model._keys_to_ignore_on_load_missing or ()
        absent = [n for n in sorted(info.missing_keys & wanted) if not any(re.search(p, n) for p in optional)]
        if absent:
            raise SourceError(
                f"{self.checkpoint.folder}: {len(absent)} parameters of the model are not in the weight files, "
                f"for example {', '.join(absent[:3])}; download the checkpoint again"
            )


class _Lazy:
    """Stands for a tensor on disk; the loader takes `[...]` of it when it wants the values."""

    def __init__(self, checkpoint: Checkpoint, name: str, changed: Tensor | None):
        self._checkpoint, self._name, self._changed = checkpoint, name, changed

    def __getitem__(self, _: Any) -> Tensor:
        return read_tensor(self._checkpoint, self._name) if self._changed is None else self._changed


def _read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(str(checkpoint.folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a config.json may provoke in transformers or in custom code
        raise _cannot_build(checkpoint, error) from None


def _model_dtype(checkpoint: Checkpoint, config: Any) -> torch.dtype:
    """What `dtype="auto"` means to transformers: the config's dtype, else that of the first float tensor."""
    if config.dtype is not None:
        return getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    stored = (DTYPES[entry.dtype] for entry in checkpoint.tensors.values())
    return next((dtype for dtype in stored if dtype.is_floating_point), torch.float32)


def _cannot_build(checkpoint: Checkpoint, error: Exception) -> SourceError:
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return SourceError(
            f"{checkpoint.folder} brings its own Python code; read that code, and when you trust it, "
            "allow it with the option trust_remote_code"
        )
    return SourceError(
        f"{checkpoint.folder}: transformers {transformers.__version__} cannot build a language model "
        f"from its config.json: {reason[:300]}"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars: one a layer would flood the log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
