"""The picture of a run: SQNR of every quantized tensor by decoder layer. Draws without a display."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_LAYER = re.compile(r"\.(\d+)\.(.+)\.weight")
_MARKERS = "osD^vP*X<>"


def sqnr_by_kind(tensors: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """{kind of projection: {layer: dB}}; of several tensors of one kind in a layer (experts) the worst. Pure."""
    kinds: dict[str, dict[int, float]] = defaultdict(dict)
    for tensor in tensors:
        found = _LAYER.search(tensor["name"])
        if found and tensor["sqnr_db"] is not None:
            layer, kind = int(found[1]), re.sub(r"\.\d+", "", found[2])
            kinds[kind][layer] = min(tensor["sqnr_db"], kinds[kind].get(layer, float("inf")))
    return dict(kinds)


def plot_sqnr(tensors: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG. `tensors` are rows of verify.json: name and sqnr_db (dB, None when exact)."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw(axes, tensors)
    axes.set_ylabel("SQNR (dB), higher is better")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)


def plot_sensitivity(by_preset: Mapping[str, Sequence[dict[str, Any]]], path: Path, *, title: str) -> None:
    """Write a PNG with one field for each preset, all of one scale. Rows as in `plot_sqnr`, of outputs."""
    figure = Figure(figsize=(9, 3.5 * len(by_preset)), layout="constrained")
    fields = figure.subplots(len(by_preset), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (preset, tensors) in zip(fields, by_preset.items(), strict=True):
        _draw(axes, tensors)
        axes.set_ylabel("outputs, SQNR (dB)")
        axes.set_title(preset, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, tensors: Sequence[dict[str, Any]]) -> None:
    for number, (kind, layers) in enumerate(sorted(sqnr_by_kind(tensors).items())):
        order = sorted(layers)
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(order, [layers[layer] for layer in order], label=kind, marker=marker, markersize=4, linewidth=1)
    axes.set_xlabel("decoder layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
