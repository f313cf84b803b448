"""What calibration measured, and its two files: calibration.safetensors and calibration.json.

Keys of the tensors, with names as on disk: `weight_absmax.<module>` and `input_absmax.<module>` fp32 0-dim;
`channel_absmax.<module>` fp32 [in]; `kv_absmax.<attention module>.k` and `.v` fp32 0-dim.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from distribute.job import read_json, write_json

WEIGHT_ABSMAX = "weight_absmax."
INPUT_ABSMAX = "input_absmax."
CHANNEL_ABSMAX = "channel_absmax."
KV_ABSMAX = "kv_absmax."


@dataclass(frozen=True)
class Statistics:
    """Ranges of weights and inputs. An expert that no token reached has no input range."""

    weight_absmax: dict[str, torch.Tensor]
    input_absmax: dict[str, torch.Tensor] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    channel_absmax: dict[str, torch.Tensor] = field(default_factory=dict)
    kv_absmax: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write both files. Called by rank 0."""
        tensors = {WEIGHT_ABSMAX + name: value for name, value in self.weight_absmax.items()}
        tensors |= {INPUT_ABSMAX + name: value for name, value in self.input_absmax.items()}
        tensors |= {CHANNEL_ABSMAX + name: value for name, value in self.channel_absmax.items()}
        for name, (keys, values) in self.kv_absmax.items():
            tensors |= {f"{KV_ABSMAX}{name}.k": keys, f"{KV_ABSMAX}{name}.v": values}
        save_file(
            {name: value.contiguous().clone() for name, value in tensors.items()}, folder / "calibration.safetensors"
        )
        write_json(folder / "calibration.json", self.report)

    @classmethod
    def read(cls, folder: Path) -> "Statistics":
        """Read what `write` wrote."""
        tensors = load_file(folder / "calibration.safetensors")
        cached = _with_prefix(tensors, KV_ABSMAX)
        attentions = [name.removesuffix(".k") for name in cached if name.endswith(".k")]
        return cls(
            _with_prefix(tensors, WEIGHT_ABSMAX),
            _with_prefix(tensors, INPUT_ABSMAX),
            read_json(folder / "calibration.json"),
            _with_prefix(tensors, CHANNEL_ABSMAX),
            {name: (cached[f"{name}.k"], cached[f"{name}.v"]) for name in attentions},
        )


def _with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
