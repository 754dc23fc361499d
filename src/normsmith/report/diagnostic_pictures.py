"""Pictures of whatever runs logged besides the loss: a new quantity appears without a line of code here."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from normsmith.report.account import Account, plain_name
from normsmith.report.attached import Panel
from normsmith.report.curves import Band, band_of, natural, thin, thin_band
from normsmith.report.drawing import Theme, shorten
from normsmith.report.pictures import Picture, picture_of

MOST = 60
"""Pictures of one study; more would be a page that nobody reads."""

# Known quantities come first and have proper names; what is in neither list follows by name.
TITLES = {
    "gate": "Taper gate",
    "gate_entropy": "Gate entropy (nats)",
    "gate_weight": "Gate weight",
    "site_entropy": "Gate entropy of each site (nats)",
    "c": "Fixed scale c",
    "stream_scale": "Scale of the stream",
    "scale_target": "Target of the scale loss",
    "auxiliary_loss": "Auxiliary loss",
    "update_angle": "Update angle (radians)",
    "radial_product": "Radial product",
    "logit_norm": "Norm of the logits",
}
_ORDINARY = ("grad_norm", "learning_rate")  # every run has them, so they come last
_LOSSES = ("loss", "eval_loss")


@dataclass(frozen=True)
class _Line:
    arm: str
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: int


def diagnostic_pictures(account: Account) -> list[Picture]:
    """A picture for every quantity over time, one over its members at the end, and one for every panel."""
    names = {name for runs in account.shown.values() for run in runs for name, _ in run.curves}
    ordered = sorted(names - set(_LOSSES), key=_rank)
    made: list[Picture | None] = []
    for name in ordered:
        made += [_over_time(account, name), _over_members(account, name)]
    made += _panels(account)
    return [picture for picture in made if picture][:MOST]


def _rank(name: str) -> tuple[int, int, str]:
    if name in _ORDINARY:
        return 2, _ORDINARY.index(name), name
    return (0, list(TITLES).index(name), name) if name in TITLES else (1, 0, name)


def title_of(name: str) -> str:
    """How a logged key is called."""
    plain = plain_name(name)
    return TITLES.get(name) or plain[:1].upper() + plain[1:]


def _over_time(account: Account, name: str) -> Picture | None:
    bands: dict[str, Band] = {}
    grouped = False
    for arm, runs in account.shown.items():
        curves = [c for run in runs if run.outcome.state == "finished" for (n, _), c in run.curves.items() if n == name]
        grouped |= any(member for run in runs for n, member in run.curves if n == name)
        if curves:
            bands[arm] = band_of(curves)
    if not bands or max(len(band.steps) for band in bands.values()) < 2:
        return None

    def draw(axes: Axes, theme: Theme) -> None:
        if not name.startswith("gate_weight"):
            _scale(axes, [float(v) for band in bands.values() for v in band.mean])
        for arm, band in bands.items():
            stroke = account.strokes[arm]
            if band.runs > 1:
                steps, low, high = (list(map(float, part)) for part in thin_band(band))
                alpha = 0.07 if grouped else 0.15  # layers differ so much that their areas cover each other
                axes.fill_between(steps, low, high, color=theme.color(stroke), alpha=alpha, lw=0)
            axes.plot(
                *(list(map(float, part)) for part in thin(band.steps, band.mean)),
                **theme.line(stroke),
                label=shorten(arm),
            )
        axes.set_xlabel("Optimiser step")
        axes.set_ylabel(_wrapped(title_of(name)))

    ends = {arm: (float(band.mean[0]), float(band.mean[-1])) for arm, band in bands.items()}
    told = "; ".join(f"{arm}: {first:.4g} → {last:.4g}" for arm, (first, last) in ends.items())
    over = "seeds and layers" if grouped else "seeds"
    note = f"Lines: means over {over}; areas: lowest to highest. Key in metrics.jsonl: {name}."
    alt = f"{title_of(name)} against optimiser step, mean over {over}, first and last value. {told}."
    return picture_of(_id(name), (title_of(name), _spread(ends), note, alt), draw, len(bands))


def _spread(ends: dict[str, tuple[float, float]]) -> str:
    told = [f"{arm} {first:.3g} → {last:.3g}" for arm, (first, last) in ends.items()]
    return "; ".join(told[:4]) + ("; …" if len(told) > 4 else ".")


def _scale(axes: Axes, values: list[float]) -> bool:
    finite = [v for v in values if math.isfinite(v)]
    logarithmic = bool(finite) and min(finite) > 0 and max(finite) > 100 * min(finite)
    if logarithmic:
        axes.set_yscale("log")
    return logarithmic


def _over_members(account: Account, name: str) -> Picture | None:
    """The last values of a quantity that was logged for each layer, site or entry of a list."""
    members = {m for runs in account.shown.values() for run in runs for n, m in run.curves if n == name and m}
    if len(members) < 2:
        return None
    places = sorted(members, key=natural)
    lines: list[_Line] = []
    for arm, runs in account.shown.items():
        table = [
            [float(run.curves[name, m].values[-1]) if (name, m) in run.curves else math.nan for m in places]
            for run in runs
            if run.outcome.state == "finished"
        ]
        lines += _line(arm, [float(i) for i in range(len(places))], table)
    words = (f"{title_of(name)} by layer", "At the last step that logged it.", "Layer or site", title_of(name))
    return _profile(account, _id(name) + "-members", words, lines, places)


def _line(arm: str, x: list[float], table: list[list[float]]) -> list[_Line]:
    array = np.array([row for row in table if not all(map(math.isnan, row))], dtype=float)
    if not array.size:
        return []
    kept = [i for i in range(len(x)) if not np.isnan(array[:, i]).all()]
    array = array[:, kept]
    parts = (np.nanmean(array, axis=0), np.nanmin(array, axis=0), np.nanmax(array, axis=0))
    mean, low, high = ([float(v) for v in part] for part in parts)
    return [_Line(arm, [x[i] for i in kept], mean, low, high, len(array))]


def _panels(account: Account) -> list[Picture | None]:
    known: dict[tuple[str, str], list[Any]] = {}
    for runs in account.shown.values():
        for panel in (panel for run in runs for panel in run.panels):
            for series in panel.series:
                known.setdefault((panel.title, series), []).append(panel)
    several = {title for title, _ in known if sum(t == title for t, _ in known) > 1}
    made: list[Picture | None] = []
    for number, ((title, series), panels) in enumerate(known.items()):
        first = panels[0]
        # Arms need not have the same places: with another placement other sites are tapered.
        everywhere = list(dict.fromkeys(x for panel in panels for x in panel.x))
        numeric = all(not isinstance(x, str) for x in everywhere)
        everywhere = sorted(everywhere) if numeric else everywhere
        places = [str(x) if isinstance(x, str) else f"{x:g}" for x in everywhere]
        x = [float(v) for v in everywhere] if numeric else [float(i) for i in range(len(places))]
        lines: list[_Line] = []
        for arm, runs in account.shown.items():
            found = [p for run in runs for p in run.panels if p.title == title and series in p.series]
            values = [dict(zip(panel.x, panel.series[series], strict=True)) for panel in found]
            table = [[math.nan if (v := each.get(place)) is None else v for place in everywhere] for each in values]
            lines += _line(arm, x, table)
        heading = f"{title}: {series}" if title in several else title
        label = f"{heading} ({first.unit})" if first.unit else heading
        words = (heading, "From diagnostics.json.", first.x_label, label)
        shares = all(map(_of_a_whole, panels))
        made.append(_profile(account, f"panel-{number}", words, lines, None if numeric else places, shares))
    return made


def _of_a_whole(panel: Panel) -> bool:
    """Whether the series add up to 1 at every place, as the weights of a gate do."""
    return len(panel.series) > 1 and all(
        None not in values and math.isclose(sum(values), 1, abs_tol=1e-3)
        for values in zip(*panel.series.values(), strict=True)
    )


def _profile(
    account: Account,
    name: str,
    words: tuple[str, str, str, str],
    lines: list[_Line],
    places: list[str] | None,
    shares: bool = False,
) -> Picture | None:
    """Values along layers; `words` are title, note, and the names of the axes; shares of a whole stay linear."""
    if not lines:
        return None
    title, said, x_label, y_label = words

    def draw(axes: Axes, theme: Theme) -> None:
        if not shares:
            _scale(axes, [v for line in lines for v in line.mean])
        for line in lines:
            stroke = account.strokes[line.arm]
            if line.runs > 1:
                axes.fill_between(line.x, line.low, line.high, color=theme.color(stroke), alpha=0.15, lw=0)
            axes.plot(line.x, line.mean, **theme.line(stroke), marker="o", ms=3.2, label=shorten(line.arm))
        if places is None or all(place.isdigit() for place in places):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            every = math.ceil(len(places) / 16)
            named = [shorten(place, 18) for place in short_names(places)[::every]]
            steep = 30 if len(named) <= 8 else 50  # so steep that as many names do not cover each other
            axes.set_xticks(range(0, len(places), every), named, rotation=steep, ha="right", rotation_mode="anchor")
        axes.set_xlabel(x_label)
        axes.set_ylabel(_wrapped(y_label))

    ends = {line.arm: (line.mean[0], line.mean[-1]) for line in lines}
    told = "; ".join(f"{line.arm}: from {min(line.mean):.4g} to {max(line.mean):.4g}" for line in lines)
    note = f"{said} Lines: means over seeds; areas: lowest to highest."
    alt = f"{title} along {x_label.lower()}, mean over seeds, smallest and largest value. {told}."
    if places is None:
        finding = "First and last: " + _spread(ends)
    else:  # names have no order that a first and a last could belong to
        finding = "Lowest and highest: " + _spread({line.arm: (min(line.mean), max(line.mean)) for line in lines})
    return picture_of(name, (title, finding, note, alt), draw, len(lines))


def _wrapped(label: str) -> str:
    """In lines as long as an axis is high."""
    return "\n".join(textwrap.wrap(shorten(label, 52), 27))


def short_names(names: Sequence[str]) -> list[str]:
    """Module names from the number of their layer on, without last words that all of these share; else as they are.

    >>> short_names(["model.layers.0.attention_part.norm", "model.layers.0.mlp_part.norm", "model.norm"])
    ['0.attention', '0.mlp', 'norm']
    """
    parts = [name.split(".") for name in names]
    first = [next((i for i, part in enumerate(p) if part.isdigit()), len(p) - 1) for p in parts]
    kept = [p[i:] for p, i in zip(parts, first, strict=True)]
    for cut in (_without_last_part, _without_last_words):
        kept = cut(kept)
    short = [".".join(p) for p in kept]
    return short if len(set(short)) == len(names) else list(names)


def _without_last_part(names: list[list[str]]) -> list[list[str]]:
    same = len({name[-1] for name in names if len(name) > 1}) == 1
    return [name[:-1] if same and len(name) > 2 else name for name in names]


def _without_last_words(names: list[list[str]]) -> list[list[str]]:
    """`attention_norm` and `mlp_norm` in layers become `attention` and `mlp`."""
    words = [name[-1].split("_") for name in names if len(name) > 1]
    least = min(map(len, words), default=1)
    same = next((n for n in range(least) if len({word[-1 - n] for word in words}) > 1), least - 1)
    cut = [[*name[:-1], "_".join(name[-1].split("_")[:-same])] for name in names] if same else names
    return [short if len(name) > 1 else name for short, name in zip(cut, names, strict=True)]


def _id(name: str) -> str:
    return "key-" + "".join(c if c.isalnum() else "-" for c in name)
