"""FP8 (e4m3) with a scale a weight or a row, by the one protocol of all formats. The arithmetic is in `fp8.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from distribute.numerics import fp8
from distribute.numerics.codec import Ranges
from distribute.numerics.observers import rows_absmax

#: A value that is not stored: fp32 0-dim, of the whole weight.
ABSMAX = "#absmax"


@dataclass(frozen=True)
class Fp8Codec:
    """`weight_scale` per tensor follows from the whole weight; per channel it is computed with the rows.

    What one row cannot know is whether the whole weight is zero, where compressed-tensors has other scales: this is
    told by the value `#absmax`, which is not stored.
    """

    rules: fp8.Codec
    rows_together: ClassVar[int] = 1

    def weight_values(self, absmax: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
        """`weight_scale` of a weight with one scale; else `#absmax`."""
        if self.rules.per_row:
            return {ABSMAX: absmax}
        return {"weight_scale": self.rules.weight_scale(absmax.reshape(1), dtype)}

    def encode(
        self, rows: Tensor, values: Mapping[str, Tensor], *, ranges: Ranges | None = None, codes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`weight` float8_e4m3fn [n, in]; with a scale a row, their `weight_scale`."""
        assert codes is None
        if not self.rules.per_row:
            assert ranges is None
            return {"weight": self.rules.encode(rows, values["weight_scale"].to(rows.device))}
        absmax = rows_absmax(rows) if ranges is None else ranges.absmax.flatten()
        # the whole weight stands for all other rows
        absmax = torch.cat([absmax, values[ABSMAX].to(absmax.device).reshape(1)])
        scale = self.rules.weight_scale(absmax, rows.dtype)[:-1]
        return {"weight": self.rules.encode(rows, scale), "weight_scale": scale}

    def decode(self, stored: Mapping[str, Tensor], width: int) -> Tensor:
        """fp32 [n, in] values of rows."""
        return self.rules.decode(stored["weight"], stored["weight_scale"])


#: Every codec by the name that the dialects use.
CODECS: dict[str, Fp8Codec] = {name: Fp8Codec(rules) for name, rules in fp8.CODECS.items()}
