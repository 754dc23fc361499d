"""A comparison as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from normsmith.report.results import write_text
from normsmith.report.table import NOTHING, duration
from normsmith.studies.comparison import ArmRow, Comparison
from normsmith.studies.locks import guard
from normsmith.studies.statistics import EXACT_PAIRS, MOST_PAIRS

_ESCAPED = str.maketrans({c: f"\\{c}" for c in "\\`*_[]|<>"})
_PAIRED = (
    *("pairs", "mean", "deviation", "low", "high", "bootstrap_low", "bootstrap_high"),
    *("p_t", "p_sign_flip", "p_wilcoxon", "p_smallest", "effect"),
)
_STATES = ("finished", "diverged", "failed", "open", "refused")


def write_tables(comparison: Comparison, folder: Path) -> None:
    """Write `results.md`, `results.csv` and `results.json` to the study's folder."""
    with guard(folder):
        write_text(folder / "results.md", markdown(comparison))
        write_text(folder / "results.csv", comma_separated(comparison))
        write_text(folder / "results.json", json.dumps(comparison.plain(), indent=1, ensure_ascii=False) + "\n")


def cells_of(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the table, as text."""
    swept = ["Best point"] if comparison.sweep else []
    titles = ["Arm", *swept, "Seeds", f"{comparison.metric.capitalize()} [95 %]", "Difference [95 %]", "p (Holm)"]
    titles += ["p (sign flip)", "Verdict", "Parameters", "Time"]
    rows: list[list[str]] = []
    digits = f".{comparison.decimals}f"
    for row in comparison.arms:
        paired = row.paired
        rows.append(
            [
                row.arm,
                *([row.point] if swept else []),
                seeds_text(row.counts),
                _with_interval(row.mean, row.low, row.high, f"{{:{digits}}}"),
                NOTHING if paired is None else _difference(row, f"{{:+{digits}}}"),
                _p(row.p_holm),
                _p(None if paired is None else paired.p_sign_flip),
                "reference" if row.verdict is None else row.verdict.text,
                NOTHING if row.parameters is None else f"{row.parameters:,}",
                NOTHING if row.seconds is None else duration(row.seconds),
            ]
        )
    return titles, rows


def seeds_text(counts: dict[str, int]) -> str:
    """`5`, or `3 of 5 (2 diverged)`."""
    total, finished = sum(counts.values()), counts.get("finished", 0)
    rest = ", ".join(f"{counts[state]} {state}" for state in _STATES[1:] if counts.get(state))
    return f"{finished} of {total} ({rest})" if rest else str(finished)


def _with_interval(mean: float | None, low: float | None, high: float | None, form: str) -> str:
    if mean is None:
        return NOTHING
    interval = "" if low is None or high is None else f" [{form.format(low)}, {form.format(high)}]"
    return (form.format(mean) + interval).replace("-", "−")


def _difference(row: ArmRow, form: str) -> str:
    """With the number of pairs where it is not that of the seeds in the mean: the two may then seem to disagree."""
    paired = row.paired
    assert paired is not None
    pairs = "" if paired.pairs in (0, row.counts.get("finished", 0)) else f" ({paired.pairs} pairs)"
    return _with_interval(paired.mean, paired.low, paired.high, form) + pairs


def _p(value: float | None) -> str:
    return NOTHING if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def notes(comparison: Comparison, runs: bool = True) -> list[str]:
    """What a reader must know to believe the table, or not to; with `runs` also each run that does not count."""
    pairs = sorted({row.paired.pairs for row in comparison.arms if row.paired is not None and row.paired.pairs > 1})
    measure = comparison.measure
    said = _meaning(comparison)
    for number in pairs:
        smallest = 2.0 ** (1 - number)
        exact = "exact" if number <= EXACT_PAIRS else "from random signs"
        limits = " and can never reach 0.05" if smallest > 0.05 else ""
        said.append(
            f"The sign-flip test ({exact}) needs no such assumption; with {number} pairs its p cannot fall below "
            f"{smallest:.2g}{limits}."
        )
    amount = measure.amount(comparison.difference)
    said += [
        f"{row.arm}: {_needed(row)} needed to see a difference of {amount} with a chance of 0.8 after the correction."
        for row in comparison.arms
        if row.paired is not None and row.paired.deviation
    ]
    if comparison.sweep:
        said.append(
            f"Each arm is shown at the sweep point with the {measure.best} validation {measure.name} over its seeds, "
            "and measured on the test split, which took no part in the choice."
        )
    lost = [run for run in comparison.runs if runs and (run.state != "finished" or run.note)]
    said += [
        f"{', '.join(p for p in (run.arm, run.point, f'seed {run.seed}') if p)}: {run.state}"
        f"{f' ({run.note})' if run.note else ''}."
        for run in lost
    ]
    return said


def _meaning(comparison: Comparison) -> list[str]:
    measure = comparison.measure
    what = f"{measure.title}{f' in {measure.unit}' if measure.unit else ''} ({measure.better} is better)"
    if len(comparison.seeds) == 1:
        return [
            f"The {what} of one seed: without a second there is no interval, no test and no verdict; the same command "
            "with more --seeds adds them."
        ]
    return [
        f"Means over seeds of the {what} with 95 % t intervals; differences to the first arm, paired by seed: same "
        "batches and budget, and the same initial weights wherever shape and spread are those of the shared recipe.",
        "Verdicts rest on the paired t test, corrected over the arms by Holm's method, at 0.05; a t test takes the "
        "differences for normally distributed.",
    ]


def _needed(row: ArmRow) -> str:
    return f"more than {MOST_PAIRS:,} seeds" if row.needed_seeds is None else f"{row.needed_seeds} seeds"


def markdown(comparison: Comparison) -> str:
    """The table in GitHub's Markdown, with notes and the command."""
    titles, rows = cells_of(comparison)
    left = {"Arm", "Best point", "Verdict"}
    lines = [titles, ["---" if title in left else "---:" for title in titles]]
    lines += [[" ".join(cell.split()).translate(_ESCAPED) for cell in row] for row in rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    said = "".join(f"- {note.translate(_ESCAPED)}\n" for note in notes(comparison))
    heading = comparison.study.translate(_ESCAPED)
    return f"# {heading}\n\n{table}\n{said}\n```text\n{' '.join(comparison.command.split())}\n```\n"


def comma_separated(comparison: Comparison) -> str:
    """One line per arm with every number; an empty field where there is none."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(csv_rows(comparison))
    return out.getvalue()


def csv_rows(comparison: Comparison) -> list[list[str | float | None]]:
    """The titles, then the fields of each arm."""
    titles: list[str | float | None] = ["arm", "point", *_STATES, "metric", "mean", "low", "high"]
    titles += [name if name.startswith("p_") or name == "pairs" else f"difference_{name}" for name in _PAIRED]
    rows = [[*titles, "p_holm", "outcome", "verdict", "needed_seeds", "parameters", "seconds"]]
    for row in comparison.arms:
        paired = {} if row.paired is None else row.paired.to_dict()
        said = row.verdict
        fields: list[str | float | None] = [row.arm, row.point, *(row.counts.get(state, 0) for state in _STATES)]
        fields += [comparison.metric, row.mean, row.low, row.high, *(paired.get(name) for name in _PAIRED)]
        fields += [row.p_holm, said.outcome if said else "reference", said.text if said else "", row.needed_seeds]
        rows.append([*fields, row.parameters, row.seconds])
    return rows


def terminal(comparison: Comparison) -> str:
    """The table and its notes for a terminal."""
    from normsmith.surgery.table import text_table

    titles, rows = cells_of(comparison)
    return "\n".join([text_table(titles, [tuple(row) for row in rows]), "", *notes(comparison)])
