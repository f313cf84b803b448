"""Asks a parsed compressed-tensors config which scheme a layer gets, as if the newest GPU were there."""

import sys
from typing import Any
from unittest.mock import Mock

import torch

LAYER = "model.layers.0.mlp.down_proj"


def scheme_of_layer(config: Any, ask: str, package: str) -> str:
    """The name of the scheme's class; raises what the engine raises when it has none.

    Args:
        config: the parsed config; one of another dialect names its own class.
        ask: the config's method that chooses.
        package: where its schemes are; the functions there that choose a kernel for this machine choose none.
    """
    if not hasattr(config, ask):
        return type(config).__name__
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for chooser in [one for one in vars(module) if one.startswith(("init_", "choose_"))]:
                setattr(module, chooser, Mock())
    config._check_scheme_supported = lambda *_, **__: True
    return type(getattr(config, ask)(torch.nn.Linear(128, 128, device="meta"), layer_name=LAYER)).__name__
