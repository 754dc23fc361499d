"""The four pictures of a report: each is drawn for light and dark pages and says in words what it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from normsmith.report.drawing import LEGEND_LIMIT, Theme, plain_ticks, render, shorten
from normsmith.report.palette import Stroke, decode_stroke, strokes
from normsmith.report.results import Arm, DecodeRow, Point, Results
from normsmith.report.table import number

# More points than this cannot be told apart at the size of the picture, and would make the page large.
MOST_POINTS = 400
MOST_DOTS = 60

Series = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Picture:
    """A picture as data URIs: `finding` and `note` are its caption, `alt` says all that it shows."""

    name: str
    title: str
    finding: str
    note: str
    alt: str
    width: int
    height: int
    light: str
    dark: str


def pictures(results: Results) -> list[Picture]:
    """Draw every picture that has data."""
    made = (make(results) for make in (_losses, _gates, _streams, _decode))
    return [picture for picture in made if picture]


def picture_of(
    name: str,
    words: tuple[str, str, str, str],
    draw: Callable[[Axes, Theme], None],
    legend: int,
    rows: int = 0,
    height: float | None = None,
) -> Picture:
    """Draw a picture; `words` are its title, finding, note and alternative text, and the rest is as in `render`."""
    title, finding, note, alt = words
    light, dark, width, pixels = render(draw, legend, rows, height)
    return Picture(name, title, finding, note, alt, width, pixels, light, dark)


def _series(arm: Arm, pick: Callable[[Point], float | None]) -> Series:
    pairs = [(p.step, v) for p in arm.curve if (v := pick(p)) is not None and math.isfinite(v)]
    stride = math.ceil(len(pairs) / MOST_POINTS) or 1
    kept = pairs[::-1][::stride][::-1]  # from the end, so that the last point stays
    return [step for step, _ in kept], [value for _, value in kept]


@dataclass(frozen=True)
class _Line:
    """One arm's curves: `strong` is its validation loss or, where none was measured, its training loss again."""

    arm: Arm
    stroke: Stroke
    training: Series
    strong: Series


def _dots(series: Series) -> dict[str, Any]:
    return {"marker": "o", "ms": 3.2} if len(series[0]) <= MOST_DOTS else {}


def _losses(results: Results) -> Picture | None:
    known = strokes(results)
    lines: list[_Line] = []
    for arm in results.arms:
        training, validation = _series(arm, lambda p: p.loss), _series(arm, lambda p: p.validation_loss)
        if training[0] or validation[0]:
            lines.append(_Line(arm, known[arm.name], training, validation if validation[0] else training))
    if not lines:
        return None
    limits = loss_limits([series[1] for line in lines for series in (line.training, line.strong)])

    def draw(axes: Axes, theme: Theme) -> None:
        for line in lines:
            axes.plot(*line.training, **theme.line(line.stroke, thin=True))
            axes.plot(*line.strong, **theme.line(line.stroke), **_dots(line.strong), label=shorten(line.arm.label))
            if line.arm.diverged:
                # Where the arm was last seen: NaN cannot be drawn.
                step, value = max((s[0][-1], s[1][-1]) for s in (line.training, line.strong) if s[0])
                axes.plot(
                    step,
                    min(value, limits[1] if limits else value),
                    color=theme.color(line.stroke),
                    marker="x",
                    ms=8,
                    mew=2,
                    clip_on=False,
                )
        if limits:
            axes.set_ylim(*limits)
        axes.set_xlabel("Optimiser step")
        axes.set_ylabel("Loss")
        _enlarge_the_end(axes, theme, lines)

    final = [(line.arm.label, _final_loss(line)) for line in lines]
    ends = _listing((label, f"{v:.3f}" if math.isfinite(v) else "diverged") for label, v in final)
    last = max(steps[-1] for line in lines for steps, _ in (line.training, line.strong) if steps)
    measured = any(line.strong is not line.training or line.arm.validation_loss is not None for line in lines)
    kind = "validation" if measured else "training"
    note = "Thin lines: training; thick lines: validation; inset: the end enlarged." if measured else "Training loss."
    note += " A cross marks where an arm diverged." if any(line.arm.diverged for line in lines) else ""
    note += f" Values above {limits[1]:.3g} are cut off." if limits else ""
    alt = f"Loss against optimiser step, up to step {last:,}. Final {kind} loss: {ends}."
    return picture_of("loss", ("Loss", _loss_finding(final, kind), note, alt), draw, len(lines))


def _enlarge_the_end(axes: Axes, theme: Theme, lines: list[_Line]) -> None:
    # Good arms differ by less than a line's width in the whole picture, and loss curves leave its upper right free.
    sound = [line for line in lines if not line.arm.diverged]
    start = 0.6 * max((line.strong[0][-1] for line in sound), default=0)
    shown = [v for line in sound for step, v in zip(*line.strong, strict=True) if step >= start]
    if not shown or len(shown) < 2 * len(sound) or max(shown) <= min(shown):
        return
    inset = axes.inset_axes((0.4, 0.42, 0.59, 0.55))
    for line in sound:
        inset.plot(*line.strong, **theme.line(line.stroke), **_dots(line.strong))
    margin = 0.08 * (max(shown) - min(shown))
    inset.set_xlim(left=start)
    inset.set_ylim(min(shown) - margin, max(shown) + margin)
    inset.set_facecolor(theme.back)
    inset.tick_params(labelsize=8)
    inset.locator_params(nbins=4)
    plain_ticks(inset)


def loss_limits(curves: list[list[float]]) -> tuple[float, float] | None:
    """Limits of the axis that leave a spike out; None where nothing sticks out."""
    # One spike or a diverging arm would press all other curves into a line at the bottom.
    filled = [curve for curve in curves if curve]
    start = max(curve[0] for curve in filled)
    low, high = min(min(curve) for curve in filled), max(max(curve) for curve in filled)
    if high <= 1.5 * start or low >= start:
        return None
    return low - 0.05 * (start - low), start + 0.1 * (start - low)


def _final_loss(line: _Line) -> float:
    if line.arm.validation_loss is not None:
        return line.arm.validation_loss
    return math.nan if line.arm.diverged else line.strong[1][-1]


def _loss_finding(final: list[tuple[str, float]], kind: str) -> str:
    finite = [(label, value) for label, value in final if math.isfinite(value)]
    if not finite:
        return f"No arm ended with a finite {kind} loss."
    best, lowest = min(finite, key=lambda end: end[1])
    text = f"{best} ends lowest, at a {kind} loss of {lowest:.3f}"
    reference, value = final[0]
    if math.isfinite(value) and value > lowest:
        text += f", {value - lowest:.3f} below {reference}"
    return text + "."


def _gates(results: Results) -> Picture | None:
    gates = {arm.name: _series(arm, lambda p: p.gate) for arm in results.arms}
    drawn = [arm for arm in results.arms if gates[arm.name][0]]
    if not drawn:
        return None
    known = strokes(results)

    def draw(axes: Axes, theme: Theme) -> None:
        for arm in drawn:
            axes.plot(*gates[arm.name], **theme.line(known[arm.name]), label=shorten(arm.label))
        axes.set_xlabel("Optimiser step")
        axes.set_ylabel("Gate")

    told = [f"{arm.label}: {_gate_path(*gates[arm.name])}" for arm in drawn]
    alt = f"Taper gate against optimiser step. {'; '.join(told)}."
    note = "1: the norm works as usual; 0: it is a fixed linear map and can be folded away."
    return picture_of("gate", ("Taper gate", told[0] + ".", note, alt), draw, len(drawn))


def _gate_path(steps: list[int], values: list[float]) -> str:
    settled = len(values) - 1
    while settled and abs(values[settled - 1] - values[-1]) < 1e-3:
        settled -= 1
    if not settled:
        return f"the gate stays at {values[-1]:.2f}"
    return f"the gate goes from {values[0]:.2f} to {values[-1]:.2f} and is settled from step {steps[settled]:,}"


def _streams(results: Results) -> Picture | None:
    scales = {arm.name: [(i, v) for i, v in enumerate(arm.stream_scale) if math.isfinite(v)] for arm in results.arms}
    drawn = [arm for arm in results.arms if scales[arm.name]]
    if not drawn:
        return None
    known = strokes(results)
    values = [v for arm in drawn for _, v in scales[arm.name]]
    logarithmic = min(values) > 0 and max(values) > 10 * min(values)

    def draw(axes: Axes, theme: Theme) -> None:
        if logarithmic:
            axes.set_yscale("log")
        for arm in drawn:
            layers, rms = zip(*scales[arm.name], strict=True)
            axes.plot(layers, rms, **theme.line(known[arm.name]), marker="o", ms=3.2, label=shorten(arm.label))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("Sublayer (0: entry)")
        axes.set_ylabel("RMS of the stream" + (" (log scale)" if logarithmic else ""))

    told = _listing((arm.label, _growth(arm.stream_scale)) for arm in drawn)
    largest = max(drawn, key=lambda arm: max(v for _, v in scales[arm.name]))
    finding = f"{largest.label} has the largest stream: RMS {_growth(largest.stream_scale)}."
    alt = f"RMS of the residual stream after each sublayer{', log scale' if logarithmic else ''}. {told}."
    return picture_of(
        "stream", ("Scale of the stream", finding, "Root mean square after each sublayer.", alt), draw, len(drawn)
    )


def _growth(scales: tuple[float, ...]) -> str:
    return f"from {number(scales[0], '{:,.4g}')} at the entry to {number(scales[-1], '{:,.4g}')} at the end"


def _decode(results: Results) -> Picture | None:
    return decode_picture(results.decode, strokes(results))


def decode_picture(measured: Sequence[DecodeRow], known: dict[str, Stroke]) -> Picture | None:
    """Bars of decode speed in the colours of the arms in `known`; None where nothing was measured."""
    rows = [row for row in measured if math.isfinite(row.median)]
    if not rows:
        return None
    colors: list[Stroke] = [decode_stroke(row.name, known) for row in rows]
    longest = max(row.high if math.isfinite(row.high) else row.median for row in rows)

    def draw(axes: Axes, theme: Theme) -> None:
        for y, (row, stroke) in enumerate(zip(rows, colors, strict=True)):
            axes.barh(y, row.median, height=0.42, color=theme.color(stroke))
            end = row.median
            if math.isfinite(row.low) and math.isfinite(row.high):
                reach = [[max(row.median - row.low, 0)], [max(row.high - row.median, 0)]]
                halo = [withStroke(linewidth=3.5, foreground=theme.back)]
                axes.errorbar(
                    row.median, y, xerr=reach, color=theme.ink, elinewidth=1.2, capsize=3.5, path_effects=halo
                )
                end = max(row.high, end)
            axes.text(0, y - 0.3, shorten(row.label, LEGEND_LIMIT), va="bottom", color=theme.ink)
            ratio = number(row.ratio, "{:.2f}×")
            axes.text(end + 0.02 * longest, y, ratio, va="center", color=theme.ink, weight="bold")
        axes.set_ylim(len(rows) - 0.6, -0.75)
        axes.set_xlim(0, 1.14 * longest)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("Tokens per second")

    first = rows[0].label
    if sum(row.name == rows[0].name for row in rows) > 1:
        first = f"{rows[0].name} of the same batch"
        fastest = max(rows, key=lambda row: row.ratio)
        finding = f"{fastest.label} gains most: {number(fastest.ratio, '{:.2f}')} times the {first}."
    else:
        fastest = max(rows, key=lambda row: row.median)
        finding = f"{fastest.label} is fastest: {fastest.median:,.0f} tokens/s"
        finding += f", {number(fastest.ratio, '{:.2f}')} times {first}." if fastest is not rows[0] else "."
    told = _listing((row.label, f"{row.median:,.0f} ({number(row.ratio, '{:.2f}')}×)") for row in rows)
    alt = f"Bars of decode speed, median tokens per second and ratio to the first: {told}."
    note = f"Bars: medians; whiskers: quartiles; ratios: relative to {first}."
    return picture_of("decode", ("Decode speed", finding, note, alt), draw, 0, len(rows))


def _listing(pairs: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{label}: {value}" for label, value in pairs)
