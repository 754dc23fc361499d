"""How a study's outcome depends on what was swept, and where its runs diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matplotlib.axes import Axes

from normsmith.report.account import Account
from normsmith.report.drawing import Theme, plain_ticks, shorten
from normsmith.report.palette import Stroke
from normsmith.report.pictures import Picture, picture_of
from normsmith.studies.measure import Measure

MOST_TOGETHER = 8
"""More arms than this hide each other in one pair of axes, so each gets a panel of its own."""
_COLUMNS = 4
_PANEL = 1.2  # inches


@dataclass(frozen=True)
class _Sweep:
    """What was found at each sweep point, in names as `Account` has them.

    Attributes:
        arms: in the study's order.
        points: from left to right.
        strokes: of the arms.
        best: arm → the point that is reported.
        found: arm → point → validation values of the seeds that finished.
        lost: arm → point → how many runs diverged.
        places: point → where it is drawn.
        label: of that axis.
        numeric: whether the places are the swept values themselves.
        lower: whether lower values are better.
    """

    arms: Sequence[str]
    points: Sequence[str]
    strokes: Mapping[str, Stroke]
    best: Mapping[str, str]
    found: Mapping[str, Mapping[str, list[float]]]
    lost: Mapping[str, Mapping[str, int]]
    places: Mapping[str, float]
    label: str
    numeric: bool
    lower: bool

    def means(self, arm: str) -> list[tuple[float, str, float]]:
        """Place, point and mean, from left to right."""
        return sorted((self.places[point], point, sum(v) / len(v)) for point, v in self.found[arm].items())

    @cached_property
    def limits(self) -> tuple[float, float] | None:
        """Limits of the axis that show how the arms differ near their best; None where nothing finished."""
        sign = 1 if self.lower else -1
        bests = [min(sign * mean for _, _, mean in means) for arm in self.arms if (means := self.means(arm))]
        values = [sign * v for points in self.found.values() for seeds in points.values() for v in seeds]
        if not values:
            return None
        low, worst = min(values), max(values)
        # Twice as far as the arms' best results lie apart: what is worse than that need not be read off.
        top = min(worst, max(bests) + (max(bests) - low))
        margin = 0.05 * (top - low) or 0.05
        first, last = sorted((sign * (low - margin), sign * (top + margin)))
        return first, last


def stability(account: Account) -> Picture | None:
    """The final validation loss, or the task's metric there, against what was swept, with the runs that diverged."""
    if not account.study.plan.sweep:
        return None
    measure = account.measure.model_copy(update={"split": "validation"})
    sweep = _read(account, measure)
    apart = len(sweep.arms) > MOST_TOGETHER
    diverged = {arm: sum(counts.values()) for arm, counts in sweep.lost.items() if counts}
    listed = "; ".join(f"{arm}: {n}" for arm, n in diverged.items())
    finding = f"Runs that diverged: {listed}." if diverged else "No run diverged."
    told = "; ".join(f"{arm}: {_told(sweep, arm)}" for arm in sweep.arms)
    note = "Lines: means over seeds; areas: lowest to highest; ringed: the point that is reported, with the "
    note += f"{measure.best} mean among those with most seeds; "
    note += "crosses above: runs that diverged, with their number."
    if apart:
        note += " One panel for each arm, the others behind it in grey; arrows: means beyond the axis."
    alt = f"{measure.title.capitalize()} at the end against {sweep.label}. {told}."
    words = ("Stability", finding, note, alt)
    if not apart:
        return picture_of("stability", words, _together(sweep, measure), len(sweep.arms))
    height = 0.6 + _PANEL * math.ceil(len(sweep.arms) / _COLUMNS)
    return picture_of("stability", words, _apart(sweep, measure), legend=0, height=height)


def _read(account: Account, measure: Measure) -> _Sweep:
    arms = account.study.plan.arms
    found: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
    lost: dict[str, dict[str, int]] = {arm: {} for arm in arms}
    for run in account.runs:
        if (value := measure.chosen_on(run.outcome)) is not None and run.outcome.state == "finished":
            found[run.cell.arm].setdefault(run.cell.point, []).append(value)
        elif run.outcome.state == "diverged":
            lost[run.cell.arm][run.cell.point] = lost[run.cell.arm].get(run.cell.point, 0) + 1
    places, label, numeric = _places(account)
    return _Sweep(
        arms=arms,
        points=sorted(places, key=places.__getitem__),
        strokes=account.strokes,
        best={row.arm: row.point for row in account.rows},
        found=found,
        lost=lost,
        places=places,
        label=label,
        numeric=numeric,
        lower=measure.better == "lower",
    )


def _told(sweep: _Sweep, arm: str) -> str:
    said: list[str] = []
    for point in sweep.points:
        values, gone = sweep.found[arm].get(point, []), sweep.lost[arm].get(point, 0)
        parts = [f"{sum(values) / len(values):.3f}"] if values else []
        said.append(f"{point}: " + (" and ".join([*parts, *([f"{gone} diverged"] if gone else [])]) or "not finished"))
    return ", ".join(said)


def _places(account: Account) -> tuple[dict[str, float], str, bool]:
    """Where a point is drawn: at its value where one number is swept, else one after the other."""
    points, sweep = account.study.points, account.study.plan.sweep
    if len(sweep) == 1:
        (key,) = sweep
        try:
            numbers = {point: float(settings[key]) for point, settings in points.items()}
        except ValueError:
            numbers = {}
        if numbers and all(math.isfinite(n) for n in numbers.values()):
            return numbers, key, True
    return {point: float(i) for i, point in enumerate(points)}, ", ".join(sweep), False


def _draw_arm(axes: Axes, theme: Theme, sweep: _Sweep, arm: str) -> None:
    """The arm's means, their range over seeds, and a ring where it is reported."""
    stroke, color = sweep.strokes[arm], theme.color(sweep.strokes[arm])
    means = sweep.means(arm)
    xs = [x for x, _, _ in means]
    axes.plot(xs, [mean for _, _, mean in means], **theme.line(stroke), marker="o", ms=4, label=shorten(arm))
    if len(xs) > 1:
        spans = [sweep.found[arm][point] for _, point, _ in means]
        axes.fill_between(xs, [min(v) for v in spans], [max(v) for v in spans], color=color, alpha=0.18, lw=0)
    for x, point, mean in means:
        if point == sweep.best[arm]:
            axes.plot(x, mean, marker="o", ms=9, mfc="none", color=color, mew=1.4)


def _draw_lost(axes: Axes, theme: Theme, sweep: _Sweep, arm: str, height: float) -> None:
    """Crosses at a height of the axes, with how many runs diverged there."""
    color = theme.color(sweep.strokes[arm])
    for point, count in sweep.lost[arm].items():
        where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(sweep.places[point], height, color=color, marker="x", ms=6, mew=1.8, **where)
        axes.annotate(
            str(count),
            (sweep.places[point], height),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


def _together(sweep: _Sweep, measure: Measure) -> Callable[[Axes, Theme], None]:
    def draw(axes: Axes, theme: Theme) -> None:
        for i, arm in enumerate(sweep.arms):
            _draw_arm(axes, theme, sweep, arm)
            # Above the curves, a line for each arm, so that crosses at one place do not hide each other.
            _draw_lost(axes, theme, sweep, arm, 1.04 + 0.055 * i)
        _scale(axes, sweep)
        if not sweep.numeric:
            slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if len(sweep.points) > 4 else {}
            axes.set_xticks(sorted(sweep.places.values()), [shorten(_values(p), 18) for p in sweep.points], **slant)
        axes.set_xlabel(sweep.label)
        axes.set_ylabel(measure.quantity.capitalize())

    return draw


def _apart(sweep: _Sweep, measure: Measure) -> Callable[[Axes, Theme], None]:
    rows = math.ceil(len(sweep.arms) / _COLUMNS)

    def draw(axes: Axes, theme: Theme) -> None:
        axes.set_axis_off()
        for i, arm in enumerate(sweep.arms):
            row, column = divmod(i, _COLUMNS)
            corner = (column / _COLUMNS + 0.012, 1 - (row + 1) / rows + 0.05 / rows)
            panel = axes.inset_axes((*corner, 1 / _COLUMNS - 0.024, 0.72 / rows))
            _draw_panel(panel, theme, sweep, arm)
            last = i + _COLUMNS >= len(sweep.arms)
            ends = list(dict.fromkeys((sweep.points[0], sweep.points[-1])))
            names = [shorten(_values(point), 8) if last else "" for point in ends]
            panel.set_xticks([sweep.places[point] for point in ends], names, fontsize=8)
            for text, side in zip(panel.get_xticklabels(), ("left", "right"), strict=False):
                text.set_horizontalalignment(side)
            panel.minorticks_off()
            panel.tick_params(axis="y", labelleft=column == 0, labelsize=8)
        middle: dict[str, Any] = {"transform": axes.transAxes, "color": theme.muted, "ha": "center"}
        axes.text(0.5, -0.22 / rows, sweep.label, va="top", **middle)
        axes.text(-0.11, 0.5, measure.quantity.capitalize(), va="center", rotation=90, **middle)

    return draw


def _draw_panel(panel: Axes, theme: Theme, sweep: _Sweep, arm: str) -> None:
    for other in sweep.arms:
        means = sweep.means(other)
        panel.plot([x for x, _, _ in means], [mean for _, _, mean in means], color=theme.grid, lw=1)
    _draw_arm(panel, theme, sweep, arm)
    _draw_lost(panel, theme, sweep, arm, 0.9)
    _scale(panel, sweep)
    panel.set_title(shorten(arm, 18), loc="left", fontsize=9, pad=4, color=theme.ink)
    if sweep.limits is None:
        return
    panel.set_ylim(*sweep.limits)
    plain_ticks(panel)
    color = theme.color(sweep.strokes[arm])
    for x, _, mean in sweep.means(arm):
        if not sweep.limits[0] <= mean <= sweep.limits[1]:
            up = mean > sweep.limits[1]
            panel.plot(x, sweep.limits[up], color=color, marker="^" if up else "v", ms=5, clip_on=False)


def _values(point: str) -> str:
    """`1e-3,2` of `training.learning_rate=1e-3,training.clip=2`."""
    return ",".join(part.rpartition("=")[2] for part in point.split(","))


def _scale(axes: Axes, sweep: _Sweep) -> None:
    xs = sorted(sweep.places.values())
    if sweep.numeric and xs[0] > 0 and xs[-1] >= 5 * xs[0]:
        axes.set_xscale("log")
    axes.grid(axis="x", visible=False)
