"""The tables of a report on accuracy under corruptions, for studies whose runs measured it."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from normsmith.report.account import Account
from normsmith.report.attached import CORRUPTED
from normsmith.report.grid import NOTHING, Entry, Grid, Heading, figure, interval, probability, words
from normsmith.studies.comparison import pair_arms
from normsmith.studies.statistics import t_interval

_KEY = "corrupted_accuracy"


def robustness_grid(account: Account) -> Grid | None:
    """Mean accuracy over all corruptions and severities, one line per arm; None where no run measured it."""
    values = {
        arm: {run.cell.seed: run.outcome.extra[_KEY] for run in runs if _KEY in run.outcome.extra}
        for arm, runs in account.shown.items()
    }
    if not any(values.values()):
        return None
    paired, corrected = pair_arms(values)
    rows: list[tuple[Entry, ...]] = []
    for arm, by_seed in values.items():
        found, numbers = paired.get(arm), list(by_seed.values())
        low, high = t_interval(numbers) if len(numbers) > 1 else (None, None)
        rows.append(
            (
                words(arm, arm),
                figure(len(numbers), "{:.0f}"),
                interval(low, high, "{:.4f}", mean(numbers)) if numbers else Entry(NOTHING),
                interval(found.low, found.high, "{:+.4f}", found.mean) if found else Entry(NOTHING),
                probability(found.p_t if found else None),
                probability(corrected.get(arm)),
            )
        )
    titles = ("Seeds", "Mean accuracy [95 %]", "Difference [95 %]", "p (t)", "p (Holm)")
    source = account.study.plan.base.get("evaluation", {}).get("corruptions")
    images = "Test images" if source == "generated" else f"Images of {source}"
    note = (
        f"{images} after 15 corruptions at 5 severities each, the same for all arms and seeds. Differences to "
        f"{account.rows[0].arm}, paired by seed."
    )
    headings = (Heading("Arm", number=False), *map(Heading, titles))
    return Grid("robustness", "Accuracy under corruptions", headings, tuple(rows), note)


def corruptions_grid(account: Account) -> Grid | None:
    """One line per corruption, the hardest for the reference first, one column per arm."""
    found = {arm: means for arm in account.shown if (means := _by_corruption(account, arm))}
    if not found:
        return None
    first = next(iter(found.values()))
    hardest = sorted(first, key=first.__getitem__)
    rows = tuple((words(name), *(figure(means.get(name)) for means in found.values())) for name in hardest)
    note = "Means over the five severities and the seeds that finished."
    headings = (Heading("Corruption", number=False), *map(Heading, found))
    return Grid("corruptions", "Accuracy by corruption", headings, rows, note)


def _by_corruption(account: Account, arm: str) -> Mapping[str, float]:
    values: dict[str, list[float]] = {}
    for run in account.shown[arm]:
        for panel in run.panels:
            if panel.title == CORRUPTED and run.outcome.state == "finished":
                for name, value in zip(panel.x, next(iter(panel.series.values())), strict=True):
                    if value is not None:
                        values.setdefault(str(name), []).append(value)
    return {name: mean(each) for name, each in values.items()}
