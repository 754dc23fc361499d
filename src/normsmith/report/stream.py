"""A picture of the residual stream, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normsmith.diagnostics import StreamLayer, StreamProfile

_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#e4e7ec"
_MASSIVE = 100  # times the median: above, a linear axis would show nothing else


def draw_stream(profile: StreamProfile, path: Path) -> None:
    """Write a PNG or SVG (by the suffix) with a panel for each thing that was measured."""
    layers, blocks = profile.layers, profile.layers[1:]
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes: Any = figure.subplots(2, 3)
    norm, angle, skip, massive, sink, singular = axes.flat
    places = [layer.layer for layer in layers]
    norm.plot(places, [layer.norm for layer in layers], "o-", color=_BLUE)
    norm.set_ylim(bottom=0)
    norm.set_title("length of the stream, mean ‖h‖")
    places = places[1:]
    angle.plot(places, [_degrees(layer) for layer in blocks], "o-", color=_BLUE)
    angle.set_ylim(0, 1.1 * max(_degrees(layer) for layer in blocks))
    angle.set_title("angle by which the block turns it, degrees")
    skip.bar(places, _values([layer.skip for layer in blocks]), color=_BLUE, width=0.6)
    skip.axhline(0, color="black", linewidth=0.8)
    skip.set_title("rise of the loss without the block, nats per token")
    massive.plot([0, *places], [layer.massive for layer in layers], "o-", color=_BLUE)
    if max(layer.massive for layer in layers) > _MASSIVE:
        massive.set_yscale("log")
    else:
        massive.set_ylim(bottom=0)
    massive.set_title("massive activations, largest |h| / median")
    sink.plot(places, _values([layer.sink_head for layer in blocks]), "o-", color=_ORANGE, label="largest head")
    sink.plot(places, _values([layer.sink for layer in blocks]), "o-", color=_BLUE, label="mean over heads")
    highest = max((layer.sink_head or 0 for layer in blocks), default=0)
    sink.set_ylim(0, min(1, max(0.1, 1.15 * highest)))
    sink.set_title("attention on the first position, share")
    singular.semilogy(places, _values([layer.largest for layer in blocks]), "o-", color=_ORANGE, label="largest")
    singular.semilogy(places, _values([layer.smallest for layer in blocks]), "o-", color=_BLUE, label="smallest")
    singular.axhline(1, color="black", linewidth=0.8)
    singular.set_title("singular values of a token's block Jacobian")
    for ax in axes.flat:
        ax.title.set_fontsize(9)
        ax.set_xlim(-0.5 if ax in (norm, massive) else 0.5, len(blocks) + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color=_GREY)
        ax.set_axisbelow(True)
    for ax, values in ((skip, "skip"), (sink, "sink"), (singular, "largest")):
        if all(getattr(layer, values) is None for layer in blocks):
            ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color="#5b6472")
    for ax in (sink, singular):
        ax.legend(frameon=False, fontsize=8)
    for ax in axes[1]:
        ax.set_xlabel("block (0: what goes into the first)" if ax is massive else "block")
    figure.suptitle(f"The residual stream over {len(blocks)} blocks, {profile.tokens} tokens", fontsize=10)
    figure.savefig(path, dpi=130)


def _degrees(layer: StreamLayer) -> float:
    return math.nan if layer.angle is None else math.degrees(layer.angle)


def _values(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
