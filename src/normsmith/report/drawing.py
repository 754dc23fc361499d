"""Draw one set of axes for light and dark pages as SVG that depends on nothing but what is drawn."""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, LogLocator, NullFormatter

from normsmith.report.palette import DARK_OF, Stroke

LEGEND_LIMIT = 56
_WIDTH = 5.6  # inches: half of the page's width, so that text stays readable on a telephone
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours of page, text, axes and grid, the same as in page.css."""

    dark: bool
    back: str
    ink: str
    muted: str
    grid: str

    def color(self, stroke: Stroke) -> str:
        """The stroke's colour on this background."""
        return stroke.dark if self.dark else stroke.light

    def line(self, stroke: Stroke, thin: bool = False) -> dict[str, Any]:
        """Arguments of `Axes.plot` for a line of an arm."""
        return {"color": self.color(stroke), "ls": stroke.dash, "lw": 1.0 if thin else 1.8, "alpha": 0.5 if thin else 1}


_PARTS = ("back", "ink", "muted", "grid")
_THEMES = (
    Theme(False, "#ffffff", "#1d2430", "#57606e", "#e4e7ec"),
    Theme(True, "#15181d", "#e6e9ee", "#a3acb9", "#2d333d"),
)
_DARK_OF = {**DARK_OF, **{getattr(_THEMES[0], part): getattr(_THEMES[1], part) for part in _PARTS}}


def render(
    draw: Callable[[Axes, Theme], None], legend: int, rows: int, height: float | None = None
) -> tuple[str, str, int, int]:
    """Return the light and the dark picture as data URIs, and width and height in CSS pixels.

    `legend` is the number of entries in the legend (0: none), `rows` the number of horizontal bars (0: a line chart);
    the height follows from them unless it is given, in inches.
    """
    if height is None:
        height = 0.75 + 0.52 * rows if rows else 3.0 + 0.2 * math.ceil(legend / 2)
    svg = _svg(draw, _THEMES[0], height, bool(legend))
    # The two differ in their colours only, and laying a picture out takes far longer than replacing these.
    dark = re.sub("#[0-9a-f]{6}", lambda found: _DARK_OF.get(found[0], found[0]), svg)
    return _uri(svg), _uri(dark), round(96 * _WIDTH), round(96 * height)


def shorten(label: str, limit: int = 30) -> str:
    """One line of printable text (SVG allows no control characters) of at most `limit` characters.

    What is too long loses its middle: arms and modules differ at their ends.
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in label).split())
    if not text or text.startswith("_"):
        text = "\u200b" + text  # a zero-width space: matplotlib leaves such labels out of a legend
    kept = (limit - 1) // 2
    return text if len(text) <= limit else text[: limit - 1 - kept] + "…" + text[-kept:]


def _svg(draw: Callable[[Axes, Theme], None], theme: Theme, height: float, legend: bool) -> str:
    buffer = io.StringIO()
    # The user's matplotlibrc must not change the page; pyplot, and with it any window system, stays unused.
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_parameters(theme))
        # The browser draws the text and finds glyphs that matplotlib's own font, used for measuring only, lacks.
        warnings.filterwarnings("ignore", message="Glyph|Matplotlib currently does not support")
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        draw(axes, theme)
        plain_ticks(axes)
        if legend:
            entries = axes.get_legend_handles_labels()
            wide = max(len(label) for label in entries[1]) > 24
            columns = 2 if wide or len(entries[1]) == 2 else 3
            figure.legend(*entries, loc="outside upper left", ncols=columns)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().replace("'DejaVu Sans'", _FONT)
    # Hundredths of a point are finer than any screen, and a quarter of the bytes of long curves.
    return re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)


def _uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def plain_ticks(axes: Axes) -> None:
    """Label ticks with plain numbers; a logarithmic axis over few decades gets ticks at 1, 2 and 5."""
    for axis in (axes.xaxis, axes.yaxis):
        if not isinstance(axis.get_major_locator(), FixedLocator):  # such ticks have names
            axis.set_major_formatter(FuncFormatter(_tick))
        if axis.get_scale() == "log":
            quiet: Formatter = NullFormatter()
            axis.set_minor_formatter(quiet)
    if axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        if high < 1000 * low:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _tick(value: float, _position: int | None) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"


def _parameters(theme: Theme) -> dict[Any, Any]:
    return {
        "svg.hashsalt": "normsmith",
        "svg.fonttype": "none",
        "text.parse_math": False,  # a label may hold a dollar sign
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "text.color": theme.ink,
        "axes.labelcolor": theme.muted,
        "axes.edgecolor": theme.muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.handlelength": 1.8,
        "legend.columnspacing": 1.4,
    }
