"""The tables of a report over a study, the same for the page and for Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from normsmith.report.account import Account, RunAccount, plain_name
from normsmith.report.grid import NOTHING, Entry, Grid, Heading, figure, interval, probability, without_empty, words
from normsmith.report.table import duration
from normsmith.studies.comparison import ArmRow
from normsmith.studies.statistics import MOST_PAIRS
from normsmith.studies.tables import seeds_text


def result_grid(account: Account) -> Grid:
    """One line per arm: how many runs count, the metric, the difference to the reference, the verdict."""
    beside = _beside(account)
    note = "Published figures were reported by others and measured by them; their sources are below." if beside else ""
    return _results(account, account.rows, ("results", "Results", note), beside, swept=bool(account.comparison.sweep))


def fixed_grid(account: Account) -> Grid | None:
    """The same with every arm at the swept settings of the shared recipe; None where it has none of those swept."""
    comparison = account.comparison
    if not comparison.fixed:
        return None
    note = "Every arm at the swept settings that the shared recipe has, none at its own best."
    named = ("fixed", f"All arms at {comparison.fixed_point}", note)
    return _results(account, comparison.fixed, named, {}, swept=False)


def _results(
    account: Account, arms: Sequence[ArmRow], named: tuple[str, str, str], beside: dict[str, float], swept: bool
) -> Grid:
    metric = account.comparison.metric
    units = {p.unit for p in account.published if account.measure.is_called(plain_name(p.metric)) and p.unit}
    headings = [
        Heading("Arm", number=False),
        *([Heading(_swept(account), number=False)] if swept else []),
        Heading("Finished"),
        Heading("Diverged"),
        Heading("Failed"),
        Heading("Not counted"),
        Heading(f"{metric.capitalize()} [95 %]"),
        Heading(f"{metric.capitalize()}" + (f" ({', '.join(sorted(units))})" if units else ""), published=True),
        Heading("Difference [95 %]"),
        Heading("Verdict", number=False),
    ]
    rows: list[tuple[Entry, ...]] = []
    digits = f".{account.comparison.decimals}f"
    for row in arms:
        counts, paired = row.counts, row.paired
        rest = counts.get("open", 0) + counts.get("refused", 0)
        # The numbers of a verdict stand in the column before it.
        verdict = "reference" if row.verdict is None else re.sub(r" by \S+ \[[^]]*\]", "", row.verdict.text)
        rows.append(
            (
                words(row.arm, row.arm, "" if row.mean is not None else _state(row)),
                *([words(_point(account, row.point))] if swept else []),
                figure(counts.get("finished", 0), "{:.0f}"),
                _count(counts.get("diverged", 0)),
                _count(counts.get("failed", 0)),
                _count(rest),
                interval(row.low, row.high, f"{{:{digits}}}", row.mean) if row.mean is not None else Entry(NOTHING),
                figure(beside.get(row.arm), "{:,g}"),
                interval(paired.low, paired.high, f"{{:+{digits}}}", paired.mean) if paired else Entry(NOTHING),
                words(verdict),
            )
        )
    name, title, note = named
    return without_empty(Grid(name, title, tuple(headings), tuple(rows), note))


def _swept(account: Account, best: str = "Best ") -> str:
    keys = list(account.comparison.sweep)
    return f"{best}{keys[0].rpartition('.')[2]}" if len(keys) == 1 else f"{best}point".capitalize()


def _point(account: Account, point: str) -> str:
    # Where one setting is swept the column is named after it, so that the value says all.
    return point.partition("=")[2] if len(account.comparison.sweep) == 1 else point


def _beside(account: Account) -> dict[str, float]:
    """Arm → published figure of the study's own metric."""
    return {p.arm: p.value for p in account.published if account.measure.is_called(plain_name(p.metric))}


def _state(row: ArmRow) -> str:
    return "no run finished" if sum(row.counts.values()) else ""


def _count(number: int) -> Entry:
    return figure(float(number) if number else None, "{:.0f}")


def statistics_grid(account: Account) -> Grid | None:
    """Every number behind the verdicts; None where no arm has a pair."""
    titles = ("Pairs", "Difference", "95 % t", "95 % bootstrap", "p (t)", "p (Holm)", "p (sign flip)")
    titles += ("p (Wilcoxon)", "Effect size", "Seeds needed")
    rows: list[tuple[Entry, ...]] = []
    signed = f"{{:+.{account.comparison.decimals}f}}"
    for row in account.rows:
        found = row.paired
        if found is None or found.mean is None:
            continue
        needed = figure(row.needed_seeds, "{:,.0f}")
        if row.needed_seeds is None and found.deviation:
            needed = Entry(f"> {MOST_PAIRS:,}", float(MOST_PAIRS))
        rows.append(
            (
                words(row.arm, row.arm),
                figure(found.pairs, "{:.0f}"),
                figure(found.mean, signed),
                interval(found.low, found.high, signed),
                interval(found.bootstrap_low, found.bootstrap_high, signed),
                probability(found.p_t),
                probability(row.p_holm),
                probability(found.p_sign_flip),
                probability(found.p_wilcoxon),
                figure(found.effect, "{:+.2f}"),
                needed,
            )
        )
    if not rows:
        return None
    reference, difference = account.rows[0].arm, account.measure.amount(account.comparison.difference)
    note = (
        f"Differences to {reference}, paired by seed. p (Holm): of the t test, corrected over the arms; it decides the "
        "verdict. Effect size: Cohen's d of the "
        f"pairs, corrected for small samples. Seeds needed: to see a difference of {difference} with a chance of 0.8."
    )
    headings = (Heading("Arm", number=False), *map(Heading, titles))
    return without_empty(Grid("statistics", "Statistics", headings, tuple(rows), note))


def published_grid(account: Account) -> Grid | None:
    """What others reported, beside what was measured here under the same name."""
    if not account.published:
        return None
    rows: list[tuple[Entry, ...]] = []
    for item in account.published:
        known = item.arm in account.study.plan.arms
        ours = account.figure_of(item.metric, item.arm)
        rows.append(
            (
                words(item.arm, item.arm if known else "", "" if known else "not in this study"),
                words(item.metric),
                figure(item.value, text=f"{item.value:,g} {item.unit}".strip()),
                figure(ours, "{:.4f}"),
                words(". ".join(part.rstrip(".") for part in (item.source, item.note) if part)),
            )
        )
    headings = (
        Heading("Arm", number=False),
        Heading("Metric", number=False),
        Heading("Figure", published=True),
        Heading("Measured here"),
        Heading("Source", number=False),
    )
    note = (
        "Published figures were reported by the sources named, not measured here; they rest on other data, sizes and "
        "budgets unless the source says otherwise."
    )
    return Grid("published", "Published figures", headings, tuple(rows), note)


def arms_grid(account: Account) -> Grid:
    """The arms as typed, and what each changes."""
    rows = [
        (words(row.arm, row.arm), Entry(_changes(account.study.changes.get(row.arm, {})), code=True))
        for row in account.rows
    ]
    headings = (Heading("Arm", number=False), Heading("Changes to the shared recipe", number=False))
    return Grid("arms", "Arms", headings, tuple(rows))


def _changes(changes: dict[str, tuple[Any, Any]]) -> str:
    said = [f"{key}: {_plain(old)} → {_plain(new)}" for key, (old, new) in changes.items() if key != "name"]
    return "; ".join(said) or "nothing"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        options = cast("dict[str, Any]", value)
        listed = ", ".join(f"{key}={_plain(option)}" for key, option in options.items() if key != "kind")
        return f"{options.get('kind', '')}({listed})"
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return "not set" if value is None else str(value)


def cost_grid(account: Account) -> Grid:
    """Parameters, time and memory."""
    reference = account.rows[0].seconds
    rows: list[tuple[Entry, ...]] = []
    for row in account.rows:
        memory = account.memory.get(row.arm)
        ratio = row.seconds / reference if row.seconds is not None and reference else None
        rows.append(
            (
                words(row.arm, row.arm),
                figure(row.parameters, "{:,.0f}"),
                figure(row.seconds, text=None if row.seconds is None else duration(row.seconds)),
                figure(ratio, "{:.2f}×"),
                figure(memory, text=None if memory is None else _bytes(memory)),
            )
        )
    headings = (
        Heading("Arm", number=False),
        *map(Heading, ("Parameters", "Training time", "Time ratio", "Peak memory")),
    )
    note = "Time: median over the runs that were not interrupted; runs that shared the machine took longer. "
    note += "Ratio: to the reference."
    return without_empty(Grid("cost", "Cost", headings, tuple(rows), note))


def _bytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def further_grid(account: Account) -> Grid | None:
    """Further numbers of the runs' results, mean over seeds."""
    names = [name for name in account.measured if name != account.comparison.metric]
    if not names:
        return None
    rows = [
        (words(row.arm, row.arm), *(figure(account.measured[name].get(row.arm), "{:,.6g}") for name in names))
        for row in account.rows
    ]
    headings = (Heading("Arm", number=False), *(Heading(name[:1].upper() + name[1:]) for name in names))
    return Grid("further", "Further results", headings, tuple(rows), "Means over the seeds that finished.")


def decode_grid(account: Account) -> Grid | None:
    """Decode speeds."""
    if not account.decode:
        return None
    rows = [
        (
            words(row.label, row.name if row.name in account.strokes else ""),
            figure(row.median, "{:,.0f}"),
            figure(row.low, "{:,.0f}"),
            figure(row.high, "{:,.0f}"),
            figure(row.ratio, "{:.2f}×"),
        )
        for row in account.decode
    ]
    titles = ("Median (tokens/s)", "Lower quartile", "Upper quartile", "Ratio")
    return Grid("decode", "Decode speed", (Heading("Model", number=False), *map(Heading, titles)), tuple(rows))


def runs_grid(account: Account) -> Grid:
    """Every run with what became of it and the command that repeats it."""
    rows = tuple(_run_row(account, run) for run in account.runs)
    named = next((run.outcome.metric for run in account.runs if run.outcome.metric), "metric")
    titles = ("Validation loss", "Test loss", f"Validation {named}", f"Test {named}", "Time")
    headings = (
        Heading("Arm", number=False),
        *([Heading(_swept(account, ""), number=False)] if account.comparison.sweep else []),
        Heading("Seed"),
        Heading("State", number=False),
        *map(Heading, titles),
        Heading("Note", number=False),
        Heading("Repeat it", number=False),
    )
    return without_empty(Grid("runs", "Runs", headings, rows))


def _run_row(account: Account, run: RunAccount) -> tuple[Entry, ...]:
    outcome, cell = run.outcome, run.cell
    return (
        words(cell.arm, cell.arm),
        *([words(_point(account, cell.point))] if account.comparison.sweep else []),
        figure(cell.seed, "{:.0f}"),
        words(outcome.state, badge="see note" if run.note and outcome.state == "finished" else ""),
        figure(outcome.validation_loss),
        figure(outcome.test_loss),
        figure(outcome.extra.get(f"validation_{outcome.metric}")),
        figure(outcome.extra.get(f"test_{outcome.metric}")),
        figure(outcome.seconds, text=None if outcome.seconds is None else duration(outcome.seconds)),
        words(run.note),
        # A recipe that is not the study's would repeat something else.
        words(NOTHING) if outcome.state == "refused" else Entry(account.command(run), account.command(run), code=True),
    )


def differing_grid(account: Account) -> Grid | None:
    """Facts of the environment in which runs differ."""
    _, differing = account.environment
    if not differing:
        return None
    rows = [
        (words(key), words("; ".join(f"{value} ({count} runs)" for value, count in values.items())))
        for key, values in differing.items()
    ]
    headings = (Heading("Fact", number=False), Heading("Values", number=False))
    note = "Runs that differ here may differ in their last digits and their times for reasons that are not the arms'."
    return Grid("differing", "Runs differ in their environment", headings, tuple(rows), note)


def lost_runs(account: Account) -> list[str]:
    """Runs that do not count or are damaged, each with its reason; equal reasons together."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for run in account.runs:
        if run.outcome.state != "finished" or run.note:
            grouped.setdefault((run.outcome.state, run.note), []).append(run.cell.label)
    return [
        f"{state} ({'; '.join(labels)})" + (f": {note}" if note else "") for (state, note), labels in grouped.items()
    ]


def counted(account: Account) -> str:
    """`12 of 12`, or `9 of 12 (3 diverged)`."""
    counts: dict[str, int] = {}
    for run in account.runs:
        counts[run.outcome.state] = counts.get(run.outcome.state, 0) + 1
    return seeds_text(counts)
