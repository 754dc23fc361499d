"""Everything a report says about one study, read from its folder without torch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from normsmith.errors import InputError
from normsmith.report.attached import Panel, Published, read_decode, read_panels, read_published
from normsmith.report.curves import Curve, Key, read_curves
from normsmith.report.palette import Stroke, strokes_of
from normsmith.report.results import DecodeRow
from normsmith.studies.cells import Outcome, read_metrics, read_object
from normsmith.studies.checked import KnownCell, KnownStudy, open_study
from normsmith.studies.comparison import ArmRow, Comparison, compare_outcomes, read_outcomes
from normsmith.studies.files import DECODE, DIAGNOSTICS, ENVIRONMENT, METRICS, PUBLISHED, RECIPE
from normsmith.studies.measure import LOSS, Measure

Curves = dict[Key, Curve]

_HEADING = 80  # characters of arms that a heading can hold


@dataclass(frozen=True)
class RunAccount:
    """One run with what it logged; only runs that finished or diverged have curves."""

    cell: KnownCell
    outcome: Outcome
    curves: Curves
    panels: tuple[Panel, ...]
    note: str
    environment: dict[str, str]


@dataclass(frozen=True)
class Account:
    """One study."""

    study: KnownStudy
    comparison: Comparison
    runs: tuple[RunAccount, ...]
    published: tuple[Published, ...]
    decode: tuple[DecodeRow, ...]

    @property
    def name(self) -> str:
        """Of the study's folder."""
        return self.comparison.study

    @cached_property
    def strokes(self) -> dict[str, Stroke]:
        """Arm → colour and dashes, the same in every picture and table."""
        return strokes_of(self.study.plan.arms)

    @cached_property
    def shown(self) -> dict[str, list[RunAccount]]:
        """Arm → its runs at the sweep point that the table shows."""
        best = {row.arm: row.point for row in self.comparison.arms}
        return {arm: [run for run in self.runs if (run.cell.arm, run.cell.point) == (arm, best[arm])] for arm in best}

    @property
    def measure(self) -> Measure:
        """What the arms are compared by."""
        return self.comparison.measure

    @property
    def rows(self) -> tuple[ArmRow, ...]:
        """One per arm; the first is the reference."""
        return self.comparison.arms

    @cached_property
    def measured(self) -> dict[str, dict[str, float]]:
        """Metric → arm → mean over the finished runs shown: the study's own, and further numbers of results."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.mean is not None:
                found.setdefault(self.comparison.metric, {})[row.arm] = row.mean
        for arm, runs in self.shown.items():
            done = [run.outcome for run in runs if run.outcome.state == "finished"]
            if self.measure.name != LOSS:
                found |= _losses(found, arm, done)
            for name in dict.fromkeys(name for outcome in done for name in outcome.extra):
                if not plain_name(name).endswith(" bytes") and name != "resumed":
                    values = [outcome.extra[name] for outcome in done if name in outcome.extra]
                    found.setdefault(plain_name(name), {})[arm] = sum(values) / len(values)
        return found

    def figure_of(self, metric: str, arm: str) -> float | None:
        """What was measured of an arm under a name; `accuracy` is that of the split which the study reports."""
        wanted = plain_name(metric).casefold()
        if self.measure.is_called(wanted):
            wanted = self.comparison.metric.casefold()
        measured = {plain_name(name).casefold(): values for name, values in self.measured.items()}
        return measured.get(wanted, {}).get(arm)

    @cached_property
    def memory(self) -> dict[str, float]:
        """Arm → largest `peak_memory_bytes` that a run recorded."""
        found: dict[str, float] = {}
        for arm, runs in self.shown.items():
            recorded = [m for run in runs if (m := run.outcome.extra.get("peak_memory_bytes")) is not None]
            if recorded:
                found[arm] = max(recorded)
        return found

    @cached_property
    def environment(self) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
        """What all runs share, and key → value → number of runs where they differ."""
        ran = [run.environment for run in self.runs if run.environment and run.outcome.state != "refused"]
        counted = {
            key: Counter(facts.get(key, "not recorded") for facts in ran)
            for key in dict.fromkeys(key for facts in ran for key in facts)
        }
        shared = {key: next(iter(values)) for key, values in counted.items() if len(values) == 1}
        return shared, {key: dict(values.most_common()) for key, values in counted.items() if len(values) > 1}

    def command(self, run: RunAccount) -> str:
        """What repeats one run, to the bit on the same machine with as many threads."""
        recipe, start = run.cell.folder / RECIPE, run.cell.start
        words = ["normsmith", "train", str(recipe), *(["--start", str(start)] if start != recipe else [])]
        again = Path("runs/again") / run.cell.folder.relative_to(self.study.folder)
        return shlex.join([*words, "-o", str(again)])

    @property
    def summary(self) -> str:
        """The outcome in a sentence or two."""
        total = len(self.runs)
        done = sum(run.outcome.state == "finished" for run in self.runs)
        ran = f"{len(self.rows)} arms, {_plural(len(self.study.plan.seeds), 'seed')}"
        if self.study.plan.sweep:
            ran += f", {len(self.study.points)} sweep points"
        ran += f": {done} of {_plural(total, 'run')} finished" if done < total else f", {_plural(total, 'run')}"
        return f"{ran}. Against {self.rows[0].arm} ({self.comparison.metric}): {said_of(self.rows)}."

    @property
    def title(self) -> str:
        """The page's heading."""
        arms = self.study.plan.arms
        listed = ", ".join(arms)
        return f"{self.name}: {listed if len(listed) <= _HEADING else f'{len(arms)} arms, beginning with {arms[0]}'}"


def read_account(folder: Path, difference: float = 0.01, metric: str | None = None) -> Account:
    """Read one study for a report.

    Args:
        folder: the study.
        difference: in the metric's unit; how many seeds would be needed to see one as large.
        metric: `loss` or the task's metric by name; by default the task's metric where it has one.

    Raises:
        InputError: no study, one of another format, none of its runs has finished, its runs report no such metric, or a
            damaged file of published figures or decode speeds.
    """
    study = open_study(folder)
    measure, outcomes = read_outcomes(study, metric)
    return Account(
        study=study,
        comparison=compare_outcomes(study, measure, outcomes, difference),
        runs=tuple(_run(cell, outcome) for cell, outcome in zip(study.cells, outcomes, strict=True)),
        published=read_published(folder / PUBLISHED),
        decode=read_decode(folder / DECODE),
    )


def said_of(rows: Sequence[ArmRow]) -> str:
    """The verdicts, equal ones together: `dyt: worse by …; film, adanorm: no difference seen`."""
    alike: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict is not None:
            alike.setdefault(row.verdict.text, []).append(row.arm)
    return "; ".join(f"{', '.join(arms)}: {text}" for text, arms in alike.items())


def _run(cell: KnownCell, outcome: Outcome) -> RunAccount:
    notes, curves, panels = [outcome.note] if outcome.note else [], Curves(), ()
    if outcome.state in ("finished", "diverged"):
        entries = outcome.entries if outcome.state == "finished" else read_metrics(cell.folder / METRICS)[0]
        curves, broken = read_curves(entries)
        if broken and outcome.state == "finished":
            notes.append(f"{METRICS}: a number was not finite at step {_listed(broken)}")
        try:
            panels = read_panels(cell.folder / DIAGNOSTICS)
        except InputError as error:
            notes.append(f"{DIAGNOSTICS} is left out: {str(error).removeprefix(f'{cell.folder / DIAGNOSTICS}: ')}")
    facts: Mapping[str, object] = read_object(cell.folder / ENVIRONMENT) or {}
    return RunAccount(cell, outcome, curves, panels, "; ".join(notes), {k: str(v) for k, v in facts.items()})


def _losses(found: dict[str, dict[str, float]], arm: str, done: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """`found` with the losses of a study that is judged by another number."""
    losses = {"validation loss": [o.validation_loss for o in done], "test loss": [o.test_loss for o in done]}
    means = {name: [v for v in values if v is not None] for name, values in losses.items()}
    return {name: {**found.get(name, {}), arm: sum(v) / len(v)} for name, v in means.items() if v}


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:3])) + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def plain_name(name: str) -> str:
    """`peak_memory` as `peak memory`: metrics are compared by what they say."""
    return " ".join(name.replace("_", " ").split())
