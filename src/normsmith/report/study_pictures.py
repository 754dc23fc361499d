"""The pictures of a study: differences with intervals, losses with seed bands, stability, and whatever was logged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from normsmith.report.account import Account, said_of
from normsmith.report.curves import Band, Curve, Steps, Values, band_of, thin, thin_band
from normsmith.report.diagnostic_pictures import diagnostic_pictures
from normsmith.report.drawing import Theme, shorten
from normsmith.report.grid import NOTHING
from normsmith.report.pictures import Picture, decode_picture, loss_limits, picture_of
from normsmith.report.stability import stability

LOSS, VALIDATION = ("loss", ""), ("eval_loss", "")
_LABEL = 44
_BOOTSTRAP_PAIRS = 8
_MANY = 400  # a forest with more arms would be a page on its own


def study_pictures(account: Account) -> tuple[list[Picture], list[Picture]]:
    """The pictures of the outcome, and those of what was logged besides the loss."""
    made = [forest(account), losses(account), ends(account), stability(account)]
    made.append(decode_picture(account.decode, account.strokes))
    return [picture for picture in made if picture], diagnostic_pictures(account)


def forest(account: Account) -> Picture | None:
    """Differences to the reference with their t intervals, and bootstrap intervals where there are enough pairs."""
    rows = [row for row in account.rows if row.paired is not None and row.paired.mean is not None][:_MANY]
    if not rows:
        return None
    reference, metric, measure = account.rows[0].arm, account.comparison.metric, account.measure

    def draw(axes: Axes, theme: Theme) -> None:
        axes.axvline(0, color=theme.muted, lw=1.2)
        for y, row in enumerate(rows):
            found, color = row.paired, theme.color(account.strokes[row.arm])
            assert found is not None
            assert found.mean is not None
            if _many_pairs(found) and found.bootstrap_low is not None and found.bootstrap_high is not None:
                axes.plot([found.bootstrap_low, found.bootstrap_high], [y, y], color=color, lw=6, alpha=0.35)
            if found.low is not None and found.high is not None:
                axes.errorbar(
                    found.mean,
                    y,
                    xerr=[[found.mean - found.low], [found.high - found.mean]],
                    color=color,
                    elinewidth=1.6,
                    capsize=4,
                )
            sure = row.verdict is not None and row.verdict.outcome in ("better", "worse")
            axes.plot(found.mean, y, marker="o", ms=7, color=color, mfc=color if sure else theme.back, mew=1.6)
            halo = [withStroke(linewidth=3, foreground=theme.back)]
            across = axes.get_yaxis_transform()
            label = shorten(row.arm, _LABEL)
            axes.text(0, y - 0.26, label, va="bottom", color=theme.ink, transform=across, path_effects=halo)
        axes.set_ylim(len(rows) - 0.55, -0.8)
        axes.margins(x=0.06)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        better = "left" if measure.better == "lower" else "right"
        unit = f"{measure.unit}; " if measure.unit else ""
        axes.set_xlabel(f"Difference in {metric} to {shorten(reference, 24)} ({unit}{better} is better)")

    told = "; ".join(f"{row.arm}: {_difference(row.paired, account.comparison.decimals)}" for row in rows)
    finding = f"{said_of(rows)}."
    resampled = "thick line: 95 % bootstrap interval; " if any(_many_pairs(row.paired) for row in rows) else ""
    note = (
        f"Whiskers: 95 % t interval; {resampled}filled: better or worse after Holm's correction; hollow: no such "
        "verdict."
    )
    alt = f"Differences in {metric} to {reference}, paired by seed, with 95 % t intervals. {told}."
    return picture_of("forest", ("Differences to the reference", finding, note, alt), draw, 0, len(rows))


def _many_pairs(found: Any) -> bool:
    """Whether a percentile bootstrap interval of the mean means what it says: of three pairs it holds 75 %, not 95."""
    return found.pairs >= _BOOTSTRAP_PAIRS


def _difference(found: Any, decimals: int) -> str:
    mean, *ends = (f"{v:+.{decimals}f}" for v in (found.mean, found.low, found.high) if v is not None)
    return f"{mean}{f' [{ends[0]}, {ends[1]}]' if ends else ''}".replace("-", "−")


class _Loss:
    """The curves of one arm: training and validation over the seeds that finished, and each run that diverged."""

    def __init__(self, account: Account, arm: str) -> None:
        runs = account.shown[arm]
        self.arm, self.stroke = arm, account.strokes[arm]
        done = [run.curves for run in runs if run.outcome.state == "finished"]
        self.training = _band(curves[LOSS] for curves in done if LOSS in curves)
        self.validation = _band(curves[VALIDATION] for curves in done if VALIDATION in curves)
        self.strong = self.validation or self.training
        self.lost = [run.curves[LOSS] for run in runs if run.outcome.state == "diverged" and LOSS in run.curves]

    def bands(self) -> list[Band]:
        return [band for band in (self.training, self.validation) if band is not None]


def _band(curves: Iterable[Curve]) -> Band | None:
    listed = [curve for curve in curves if len(curve.steps)]
    return band_of(listed) if listed else None


def draw_band(axes: Axes, theme: Theme, band: Band, stroke: Any, **line: Any) -> None:
    """A line for the mean and, where there are several runs, an area from the lowest to the highest."""
    if band.runs > 1:
        steps, low, high = _floats(*thin_band(band))
        axes.fill_between(steps, low, high, color=theme.color(stroke), alpha=0.18, lw=0)
    marks = {"marker": "o", "ms": 3} if len(band.steps) <= 30 else {}
    style: dict[str, Any] = {**theme.line(stroke), **marks, **line}
    axes.plot(*_floats(*thin(band.steps, band.mean)), **style)


def _floats(steps: Steps, *values: Values) -> list[list[float]]:
    return [[float(step) for step in steps], *([float(v) for v in each] for each in values)]


def losses(account: Account) -> Picture | None:
    """Learning curves with seed bands."""
    lines = [line for arm in account.shown if (line := _Loss(account, arm)).strong is not None or line.lost]
    if not lines:
        return None
    everything = [band.mean for line in lines for band in line.bands()]
    everything += [curve.values for line in lines for curve in line.lost]
    limits = loss_limits([[float(v) for v in values] for values in everything])
    measured = any(line.validation is not None for line in lines)

    def draw(axes: Axes, theme: Theme) -> None:
        for line in lines:
            label: dict[str, Any] = {"label": shorten(line.arm)}
            if line.training is not None and line.validation is not None:
                axes.plot(
                    *_floats(*thin(line.training.steps, line.training.mean)), **theme.line(line.stroke, thin=True)
                )
            if line.strong is not None:
                draw_band(axes, theme, line.strong, line.stroke, **label)
                label = {}
            for curve in line.lost:
                style: dict[str, Any] = {**theme.line(line.stroke), "lw": 1, **label}
                axes.plot(*_floats(*thin(curve.steps, curve.values)), **style)
                top = float(curve.values[-1]) if limits is None else min(float(curve.values[-1]), limits[1])
                axes.plot(
                    curve.steps[-1], top, color=theme.color(line.stroke), marker="x", ms=7, mew=1.8, clip_on=False
                )
                label = {}
        if limits:
            axes.set_ylim(*limits)
        axes.set_xlabel("Optimiser step")
        axes.set_ylabel("Loss")

    kind = "validation" if measured else "training"
    final = [(line.arm, None if line.strong is None else float(line.strong.mean[-1])) for line in lines]
    told = "; ".join(f"{arm}: {NOTHING if value is None else f'{value:.3f}'}" for arm, value in final)
    lost = sum(len(line.lost) for line in lines)
    note = "Lines: means over the seeds that finished; areas: from the lowest to the highest seed."
    note += " Thin lines: training loss." if measured else ""
    note += f" Crosses: where runs diverged ({lost})." if lost else ""
    note += f" Values above {limits[1]:.3g} are cut off." if limits else ""
    last = max(int(band.steps[-1]) for line in lines for band in (*line.bands(), *map(_alone, line.lost)))
    alt = (
        f"Loss against optimiser step, up to step {last:,}. Last {kind} loss during training, mean over seeds: {told}."
    )
    return picture_of("loss", ("Loss", _best(final, kind), note, alt), draw, len(lines))


def _alone(curve: Curve) -> Band:
    return Band(curve.steps, curve.values, curve.values, curve.values, 1)


def _best(final: Sequence[tuple[str, float | None]], kind: str) -> str:
    known = [(value, arm) for arm, value in final if value is not None]
    if not known:
        return "No run finished here."
    value, arm = min(known)
    return f"{arm} ends lowest, at a {kind} loss of {value:.3f} (mean over its seeds)."


def ends(account: Account) -> Picture | None:
    """The last part of the loss enlarged: good arms differ by less than a line's width in the whole picture."""
    lines = [line for arm in account.shown if (line := _Loss(account, arm)).strong is not None]
    bands = [(line, _last_part(line.strong)) for line in lines if line.strong is not None]
    bands = [(line, band) for line, band in bands if len(band.steps) > 1]
    if len(bands) < 2:
        return None

    def draw(axes: Axes, theme: Theme) -> None:
        for line, band in bands:
            draw_band(axes, theme, band, line.stroke, label=shorten(line.arm))
        axes.set_xlabel("Optimiser step")
        axes.set_ylabel("Loss")

    kind = "Validation" if any(line.validation is not None for line, _ in bands) else "Training"
    told = "; ".join(
        f"{line.arm}: {band.mean[-1]:.4f} ({band.low[-1]:.4f} to {band.high[-1]:.4f})" for line, band in bands
    )
    spread = max(float(band.high[-1] - band.low[-1]) for _, band in bands)
    means = [float(band.mean[-1]) for _, band in bands]
    finding = f"At the end the arms' means span {max(means) - min(means):.3f}"
    finding += f", the seeds of one arm up to {spread:.3f}." if any(band.runs > 1 for _, band in bands) else "."
    alt = f"{kind} loss over the last part of training. At the end, mean and range over seeds: {told}."
    note = f"{kind} loss in the last 40 % of the steps; areas: from the lowest to the highest seed."
    return picture_of("end", ("The end of training", finding, note, alt), draw, len(bands))


def _last_part(band: Band) -> Band:
    kept = band.steps >= 0.6 * band.steps[-1]
    return Band(band.steps[kept], band.mean[kept], band.low[kept], band.high[kept], band.runs)
