"""The quantized linear layers of a part, with parameters found for them, and the weights that an engine will see."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.dialects.table import DIALECTS
from distribute.encode import FOLD, as_matrix
from distribute.folds import Fold
from distribute.layers import matrix_of
from distribute.layerwise import Part
from distribute.linear import Linear
from distribute.numerics.table import find_codec
from distribute.scheme import Dialect, Scheme
from distribute.source import Checkpoint
from distribute.tensors import read_entry


@dataclass(frozen=True)
class Subject:
    """What is solved: a model, and how it is to be coded. The same on all ranks."""

    checkpoint: Checkpoint
    schemes: Mapping[str, Scheme]  # of all quantized modules
    dialect: Dialect
    folds: Sequence[Fold]  # of all modules that are smoothed
    dtype: torch.dtype  # the model's
    device: torch.device

    @property
    def is_sequential(self) -> bool:
        """Whether a layer's inputs are those that the coded layers before it give."""
        return any(scheme.algorithm.is_sequential for scheme in self.schemes.values() if scheme.is_solved)

    def quantized_in(self, part: Part) -> list[str]:
        """Modules of a part that are quantized."""
        return [projection.module for projection in part.projections if projection.module in self.schemes]

    def solved_in(self, part: Part) -> list[str]:
        """Those that an algorithm works on."""
        return [module for module in self.quantized_in(part) if self.schemes[module].is_solved]

    def linears_of(self, part: Part) -> dict[str, Linear]:
        """The quantized linear layers of a part as they are in the source."""
        return {module: self._linear(module) for module in self.quantized_in(part)}

    def with_parameters(self, linears: Mapping[str, Linear], parameters: Mapping[str, Tensor]) -> dict[str, Linear]:
        """These layers with their parameters (by "<module>.<name>"); absmax is the largest of those that share it.

        All that share an absmax must be among them.
        """
        by_module: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, value in parameters.items():
            module, _, leaf = name.rpartition(".")
            by_module[module][leaf] = value.to(self.device)
        found = {m: linear.with_parameters(by_module.get(m, {})) for m, linear in linears.items()}
        absmax = {module: linear.absmax for module, linear in found.items()}
        for group in DIALECTS[self.dialect].share_groups({module: self.schemes[module] for module in found}).weight:
            absmax |= dict.fromkeys(group, torch.stack([found[module].absmax for module in group]).amax())
        return {module: linear.with_parameters({"absmax": absmax[module]}) for module, linear in found.items()}

    def changes(
        self, linears: Mapping[str, Linear], parameters: Mapping[str, Tensor], *, coded: bool
    ) -> dict[str, Tensor]:
        """New values of tensors on disk under these parameters: weights, smoothed and `coded`, and what absorbs."""
        found = {name.removeprefix(FOLD): value for name, value in parameters.items() if name.startswith(FOLD)}
        for module, linear in self.with_parameters(linears, parameters).items():
            weight = linear.coded() if coded else linear.smoothed.to(torch.float32)
            kept = linear.parameters.get("pre_quant_scale")
            if kept is not None:  # in memory nothing multiplies the inputs
                weight = weight * kept.to(torch.float32)
            found[matrix_of(module, self.checkpoint.tensors).source] = weight.to(self.dtype)
        return found

    def _linear(self, module: str) -> Linear:
        scheme, matrix = self.schemes[module], matrix_of(module, self.checkpoint.tensors)
        rows = range(matrix.first_row, matrix.first_row + matrix.shape[0])
        entry = as_matrix(self.checkpoint.tensors[matrix.source])
        weight = read_entry(self.checkpoint.folder, entry, rows).to(device=self.device, dtype=self.dtype)
        return Linear(module, weight, scheme, find_codec(DIALECTS[self.dialect].codec(scheme)))
