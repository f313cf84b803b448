"""Reads a checkpoint's config with the newest SGLang's own parser, from its Python files alone.

No weight is read and no kernel chosen: this shows that the config is understood, and as which scheme. Packages
that SGLang imports for images, notebooks and GPUs and that are not here are stood in for by empty modules.
"""

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

import transformers.image_utils  # noqa: F401  finds out here that torchvision is absent
from ask_scheme import scheme_of_layer
from record import Tell, run_reader

SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes"
ABSENT = {"torchvision", "IPython", "traitlets", "gguf", "orjson", "sgl_kernel"}


class AnyName(type):
    """A class of which every name is a class like it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (), {})


class StandIn(types.ModuleType):
    """A module of which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        return getattr(AnyName("stand_in", (), {}), name)


class StandIns(MetaPathFinder, Loader):
    """Finds a stand-in for each absent package and what is in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Asked last, so that a package that is there is used."""
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def read(checkpoint: Path, request: dict[str, Any], tell: Tell) -> None:
    """Parse as at the start of SGLang's server."""
    sys.meta_path.append(StandIns())
    # Imported late: they need the stand-ins.
    from sglang.srt.configs.load_config import LoadConfig  # noqa: PLC0415
    from sglang.srt.configs.model_config import ModelConfig  # noqa: PLC0415
    from sglang.srt.model_loader.weight_utils import get_quant_config  # noqa: PLC0415

    config = ModelConfig(model_path=str(checkpoint), dtype="bfloat16")
    parsed = get_quant_config(config, LoadConfig(), {})
    tell(parsed=scheme_of_layer(parsed, "get_linear_scheme", SCHEMES))


if __name__ == "__main__":
    run_reader(read)
