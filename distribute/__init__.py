"""The rank-side library. Four documented names; see docs/architecture.md.

They are resolved on first use (PEP 562), because the flow process imports `distribute.recipe`,
`distribute.plan` and friends and must never import torch.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "NFSWorkspace": "distribute.workspace",
    "get_tensors_parallel": "distribute.gather",
    "get_configs_parallel": "distribute.gather",
    "distributed_save_hf_checkpoint": "distribute.live.save",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'distribute' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
