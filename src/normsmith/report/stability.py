"""How a study's outcome depends on what was swept, and where its runs diverged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes

from normsmith.report.account import Account
from normsmith.report.drawing import Theme, shorten
from normsmith.report.pictures import Picture, picture_of


def stability(account: Account) -> Picture | None:
    """The final validation loss, or the task's metric there, against what was swept, with the runs that diverged."""
    plan = account.study.plan
    measure = account.measure.model_copy(update={"split": "validation"})
    if not plan.sweep:
        return None
    points = list(account.study.points)
    place, label = _places(account, points)
    found: dict[str, dict[str, list[float]]] = {arm: {} for arm in plan.arms}
    lost: dict[str, dict[str, int]] = {arm: {} for arm in plan.arms}
    for run in account.runs:
        if (value := measure.chosen_on(run.outcome)) is not None and run.outcome.state == "finished":
            found[run.cell.arm].setdefault(run.cell.point, []).append(value)
        elif run.outcome.state == "diverged":
            lost[run.cell.arm][run.cell.point] = lost[run.cell.arm].get(run.cell.point, 0) + 1
    numeric = not isinstance(place, dict)
    position = place if not isinstance(place, dict) else place.__getitem__
    best = {row.arm: row.point for row in account.rows}

    def draw(axes: Axes, theme: Theme) -> None:
        for i, arm in enumerate(plan.arms):
            stroke, color = account.strokes[arm], theme.color(account.strokes[arm])
            here = sorted((position(point), point) for point in found[arm])
            xs = [x for x, _ in here]
            means = [sum(v) / len(v) for v in (found[arm][point] for _, point in here)]
            axes.plot(xs, means, **theme.line(stroke), marker="o", ms=4, label=shorten(arm))
            if len(xs) > 1:
                spans = [found[arm][point] for _, point in here]
                axes.fill_between(xs, [min(v) for v in spans], [max(v) for v in spans], color=color, alpha=0.18, lw=0)
            for x, mean in ((x, m) for (x, point), m in zip(here, means, strict=True) if point == best[arm]):
                axes.plot(x, mean, marker="o", ms=9, mfc="none", color=color, mew=1.4)
            # Above the curves, a line for each arm, so that crosses at one place do not hide each other.
            height = 1.04 + 0.055 * i
            for point, count in lost[arm].items():
                where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
                axes.plot(position(point), height, color=color, marker="x", ms=6, mew=1.8, **where)
                axes.annotate(
                    str(count),
                    (position(point), height),
                    xycoords=("data", "axes fraction"),
                    xytext=(5, 0),
                    textcoords="offset points",
                    color=color,
                    va="center",
                    fontsize=8,
                    annotation_clip=False,
                )
        _swept_axis(axes, points, position, numeric)
        axes.set_xlabel(label)
        axes.set_ylabel(measure.quantity.capitalize())

    diverged = {arm: sum(counts.values()) for arm, counts in lost.items() if counts}
    listed = "; ".join(f"{arm}: {n}" for arm, n in diverged.items())
    finding = f"Runs that diverged: {listed}." if diverged else "No run diverged."
    told = "; ".join(f"{arm}: {_told(points, found[arm], lost[arm])}" for arm in plan.arms)
    note = "Lines: means over seeds; areas: lowest to highest; ringed: the point that is reported, with the "
    note += f"{measure.best} mean among those with most seeds; "
    note += "crosses above: runs that diverged, with their number."
    alt = f"{measure.title.capitalize()} at the end against {label}. {told}."
    return picture_of("stability", ("Stability", finding, note, alt), draw, len(plan.arms))


def _told(points: Sequence[str], found: dict[str, list[float]], lost: dict[str, int]) -> str:
    said: list[str] = []
    for point in points:
        values, gone = found.get(point, []), lost.get(point, 0)
        parts = [f"{sum(values) / len(values):.3f}"] if values else []
        said.append(f"{point}: " + (" and ".join([*parts, *([f"{gone} diverged"] if gone else [])]) or "not finished"))
    return ", ".join(said)


def _places(account: Account, points: Sequence[str]) -> tuple[Callable[[str], float] | dict[str, float], str]:
    """Where a point is drawn: at its value where one number is swept, else one after the other."""
    sweep = account.study.plan.sweep
    if len(sweep) == 1:
        (key,) = sweep
        try:
            numbers = {point: float(settings[key]) for point, settings in account.study.points.items()}
        except ValueError:
            numbers = {}
        if numbers and all(math.isfinite(n) for n in numbers.values()):
            return numbers.__getitem__, key
    return {point: float(i) for i, point in enumerate(points)}, ", ".join(sweep)


def _swept_axis(axes: Axes, points: Sequence[str], position: Callable[[str], float], numeric: bool) -> None:
    xs = sorted(position(point) for point in points)
    if numeric and xs[0] > 0 and xs[-1] >= 5 * xs[0]:
        axes.set_xscale("log")
    elif not numeric:
        names = [",".join(part.rpartition("=")[2] for part in point.split(",")) for point in points]
        slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if len(points) > 4 else {}
        axes.set_xticks(xs, [shorten(name, 18) for name in names], **slant)
    axes.grid(axis="x", visible=False)
