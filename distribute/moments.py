"""What the smoothing and coding algorithms know of the inputs of linear layers: moments, summed over all tokens.

Layers that are called with the same tensor object share their moments, which are made once. The product X^T X of a
batch is fp32 and depends on the batch alone. Batches are added in fp64, which is exact unless their elements differ
by more than 2 ** 29 in size; so moments, rounded to fp32, hardly depend on how batches were dealt out: to one unit
in the last place of single elements. Ranges are exact.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distribute.errors import StageError
from distribute.inputs import channels_absmax
from distribute.numerics.moments import second_moments
from distribute.numerics.search import Histogram, histogram
from distribute.ranks import Ranks
from distribute.reduce import summed, united

_SQUARES, _MAGNITUDES = "squares.", "magnitudes."


@dataclass(frozen=True)
class Moments:
    """Of so many inputs [rows, in], all on one device."""

    rows: int
    absmax: Tensor  # fp32 [in]
    mean: Tensor  # fp32 [in], of magnitudes
    second: Tensor | None  # fp32 [in, in], X^T X; where asked for
    histogram: Histogram | None = None  # of all magnitudes; where asked for


class InputMoments:
    """Running sums over inputs, by module name on disk. One rank's own.

    `second`: the products X^T X too; `histograms`: how often magnitudes are how large.
    """

    def __init__(self, *, second: bool, histograms: bool = False):
        self.routed: dict[str, int] = {}
        self._second = second
        self._counted = histograms
        self._histograms: dict[str, Histogram] = {}
        self._of: dict[str, str] = {}  # module -> the one under whose name its inputs are kept
        self._rows: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}  # fp64
        self._absmax: dict[str, Tensor] = {}
        self._last: tuple[Tensor, str] | None = None

    def see(self, names: tuple[str, ...], x: Tensor) -> None:
        """`x` [..., in] is an input of every layer in `names`."""
        if x.numel() == 0 or not names:
            return
        if self._last is None or self._last[0] is not x:
            # The reference keeps the tensor alive, so that its identity cannot be taken over by another one.
            self._last = (x, self._of.get(names[0], names[0]))
            self._add(self._last[1], x.reshape(-1, x.shape[-1]))
        for name in names:
            key = self._of.setdefault(name, self._last[1])
            assert key == self._last[1], f"{name} shares its input with {key} in some batches only"

    def count(self, names: tuple[str, ...], rows: int) -> None:
        """So many rows were given to every layer in `names`."""
        for name in names:
            self.routed[name] = self.routed.get(name, 0) + rows

    def reduced(self, ranks: Ranks, device: torch.device) -> tuple[dict[str, Moments], dict[str, int]]:
        """Moments of all ranks' inputs by module, and rows routed to each. Called by all ranks.

        A module that no rank saw has no moments. Modules that share an input have the same object.

        Raises:
            StageError: an input is not finite; the module is named.
        """
        self._last = None
        records = ranks.control.exchange("moments", [self._of, self._rows, self.routed]).values()
        of: dict[str, str] = {}
        for own, _, _ in records:
            of |= own
        rows = _added(own for _, own, _ in records)
        sums = summed(self._sums, ranks)
        histograms = self._merged_histograms(ranks, device)
        found = {}
        for key in sorted(rows):
            magnitudes = sums.pop(_MAGNITUDES + key)
            absmax = ranks.absmax(self._absmax.get(key, torch.zeros(len(magnitudes), device=device)))
            if not bool(absmax.isfinite().all()):
                raise StageError(f"the input of {key} is not finite: a layer before it overflowed")
            second = sums.pop(_SQUARES + key).to(torch.float32).to(device) if self._second else None
            mean = (magnitudes / rows[key]).to(torch.float32).to(device)
            found[key] = Moments(rows[key], absmax, mean, second, histograms.get(key))
        return {name: found[key] for name, key in of.items()}, _added(own for _, _, own in records)

    def _add(self, key: str, x: Tensor) -> None:
        self._rows[key] = self._rows.get(key, 0) + len(x)
        seen = channels_absmax(x)
        self._absmax[key] = torch.maximum(self._absmax.get(key, seen), seen)
        self._sum(_MAGNITUDES + key, x.abs().sum(dim=0, dtype=torch.float64))
        if self._counted and bool(seen.isfinite().all()):
            own = histogram(x)
            self._histograms[key] = self._histograms[key].merge(own) if key in self._histograms else own
        if self._second:
            self._sum(_SQUARES + key, second_moments(x))

    def _merged_histograms(self, ranks: Ranks, device: torch.device) -> dict[str, Histogram]:
        record: dict[str, Tensor] = {}
        for key, own in self._histograms.items():
            parts = {"counts": own.counts, "exponent": torch.tensor(own.exponent), "largest": own.largest}
            record |= {f"{ranks.rank}.{name}.{key}": part for name, part in parts.items()}
        every = {name: part.to(device) for name, part in united(record, ranks).items()}
        found: dict[str, Histogram] = {}
        for name, counts in every.items():
            rank, kind, key = name.split(".", 2)
            if kind == "counts":
                exponent, largest = (every[f"{rank}.{other}.{key}"] for other in ("exponent", "largest"))
                own = Histogram(counts, int(exponent), largest)
                found[key] = found[key].merge(own) if key in found else own
        return found

    def _sum(self, name: str, value: Tensor) -> None:
        if name in self._sums:
            self._sums[name] += value
        else:
            self._sums[name] = value.to(torch.float64)


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for own in counts:
        for name, count in own.items():
            total[name] = total.get(name, 0) + count
    return total
