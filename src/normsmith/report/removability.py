"""A picture of a removability audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from normsmith.diagnostics import Removability

_COLORS = {True: "#0072b2", False: "#b6bfcc"}


def draw_removability(found: list[Removability], path: Path) -> None:
    """Write a PNG or SVG (by the suffix): per site what a fixed scale leaves unexplained, and how token scales vary."""
    figure = Figure(figsize=(9, 1.6 + 0.26 * len(found)), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    places = range(len(found))
    colors = [_COLORS[r.order is not None] for r in found]
    axes[0].barh(places, [r.residual for r in found], color=colors)
    for place, r in zip(places, found, strict=True):
        if r.order is not None:
            axes[0].annotate(f" {r.order}", (r.residual, place), va="center", fontsize=7)
    axes[0].set_yticks(places, [f"{r.name}  [{r.role}]" for r in found], fontsize=7)
    axes[0].set_xlabel("unexplained by one fixed scale, ‖y − ŷ‖/‖y‖")
    axes[0].invert_yaxis()
    axes[1].barh(places, [r.variation for r in found], color=colors)
    axes[1].set_xlabel("coefficient of variation of the token scale")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", color="#e4e7ec")
        ax.set_axisbelow(True)
    figure.suptitle("Removability of norms: blue can be removed, numbers give the order", fontsize=10)
    figure.savefig(path, dpi=130)
