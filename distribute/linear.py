"""One linear layer while its calibration is solved: its weight, what is known of its inputs, how it is coded."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from distribute.encode import smoothed
from distribute.moments import Moments
from distribute.numerics.codec import Codec, Grid, Ranges
from distribute.numerics.observers import absmax
from distribute.scheme import Algorithm, Scheme

#: Parameters of one linear layer, as they are stored; see `distribute.encode`.
Parameters = Mapping[str, Tensor]
OF_ROWS = ("low", "high", "codes")


@dataclass(frozen=True)
class Linear:
    """A linear layer as it is in the source. `moments`: of its inputs there; None when no token reached it."""

    module: str
    weight: Tensor  # [out, in] in the model's dtype, on the device
    scheme: Scheme
    codec: Codec
    moments: Moments | None = None
    parameters: Parameters = field(default_factory=dict)

    @property
    def algorithm(self) -> Algorithm:
        """How its open values are found."""
        return self.scheme.algorithm

    @property
    def group(self) -> int:
        """Columns that share a scale: a whole row where the format has no groups."""
        grouped = self.scheme.weights.granularity == "group"
        return self.scheme.weights.group_size if grouped else self.weight.shape[1]

    @cached_property
    def smoothed(self) -> Tensor:
        """[out, in] in the model's dtype: the weight that is coded."""
        return smoothed(self.weight, smooth=self._find("smooth"), row_scale=self._find("row_scale"))

    @cached_property
    def absmax(self) -> Tensor:
        """fp32 0-dim: of the weight that is coded, unless it shares that of others."""
        return self.parameters["absmax"] if "absmax" in self.parameters else absmax(self.smoothed)

    def with_parameters(self, parameters: Parameters) -> "Linear":
        """The same with more parameters."""
        return replace(self, parameters={**self.parameters, **parameters})

    def fake(self, rows: Tensor, whole: Tensor | None = None, ranges: Ranges | None = None) -> Tensor:
        """Rows [n, in] coded and decoded again: fp32. `whole`: absmax of the weight they are of; None: their own."""
        return self._coded(rows, absmax(rows) if whole is None else whole, ranges, None)

    def coded(self, rows: slice = slice(None), found: Parameters | None = None) -> Tensor:
        """Rows of the weight as an engine reads them, smoothed: fp32 [n, in].

        Args:
            rows: they begin at a multiple of the rows that are coded together.
            found: low, high, codes of just these rows; None: those among the parameters.
        """
        if found is None:
            found = {name: self.parameters[name][rows] for name in OF_ROWS if name in self.parameters}
        own = {name: value.to(self.weight.device) for name, value in found.items()}
        ranges = Ranges(own["low"], own["high"]) if "low" in own else None
        return self._coded(self.smoothed[rows], self.absmax, ranges, own.get("codes"))

    @property
    def has_second_moments(self) -> bool:
        """Whether X^T X of its inputs is known."""
        return self.moments is not None and self.moments.second is not None

    @property
    def has_free_ranges(self) -> bool:
        """Whether its format takes any range a group may have."""
        return self.scheme.weights.format.startswith("int")

    def grid(self, ranges: Ranges) -> Grid:
        """The grid of codes under ranges fp32 [n, groups]; integer formats only."""
        codec: Any = self.codec
        grid: Grid = codec.grid(ranges, self.weight.dtype)
        return grid

    def input_moments(self) -> Tensor | None:
        """fp32 [in, in]: of the inputs that the coded weight gets."""
        if self.moments is None or self.moments.second is None:
            return None
        smooth = self._find("smooth")
        return self.moments.second if smooth is None else self.moments.second / smooth[:, None] / smooth

    def _coded(self, rows: Tensor, whole: Tensor, ranges: Ranges | None, codes: Tensor | None) -> Tensor:
        shape = (self.weight.shape[0], self.weight.shape[1])
        values = self.codec.weight_values(whole, shape, self.weight.dtype)
        values = {name: value.to(rows.device) for name, value in values.items()}
        stored = self.codec.encode(rows, values, ranges=ranges, codes=codes)
        return self.codec.decode({**values, **stored}, rows.shape[1])

    def _find(self, name: str) -> Tensor | None:
        value = self.parameters.get(name)
        return None if value is None else value.to(self.weight.device)
