"""What a study shows: one row per arm, made from the run folders alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from normsmith.config import Config, apply_overrides
from normsmith.errors import InputError
from normsmith.studies.cells import Better, Outcome, read_cell
from normsmith.studies.checked import KnownStudy, open_study
from normsmith.studies.measure import Measure, measure_of, without_others
from normsmith.studies.statistics import ALPHA, Paired, Verdict, compare_paired, holm, needed_pairs, t_interval, verdict


class RunRow(Config):
    """One run: what became of it, and its losses and its task's metric where it has any that count."""

    arm: str
    point: str
    seed: int
    state: str
    note: str = ""
    validation_loss: float | None = None
    test_loss: float | None = None
    validation_metric: float | None = None
    test_metric: float | None = None
    seconds: float | None = None


class ArmRow(Config):
    """One arm.

    Attributes:
        arm: as it was written.
        point: the sweep point that was best on validation, which is the one shown.
        counts: state → number of runs at that point (`finished`, `diverged`, `failed`, `open`, `refused`).
        mean: of the metric over the finished seeds.
        low: lower end of its 95 % t interval, from two seeds on.
        high: its upper end.
        paired: differences to the reference, seed by seed; None for the reference itself.
        p_holm: p of the paired t test, corrected over the arms.
        verdict: in words; None for the reference.
        needed_seeds: seeds with which the stated difference would be seen with a chance of 0.8 by the test at the
            strictest step of Holm's correction, 0.05 divided by the number of arms that are tested.
        parameters: of the model.
        seconds: median training time of the runs that were not interrupted.
    """

    arm: str
    point: str = ""
    counts: dict[str, int]
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    paired: Paired | None = None
    p_holm: float | None = None
    verdict: Verdict | None = None
    needed_seeds: int | None = None
    parameters: int | None = None
    seconds: float | None = None


class Comparison(Config):
    """A whole study: the table, and under it every run.

    `metric` is what the arms are compared by (`validation loss`, `test accuracy` …), `better` and `unit` belong to it,
    and `difference` is what `needed_seeds` is about. `arms` has each arm at its own best sweep point, `fixed` all of
    them at `fixed_point`, the one whose settings the shared recipe has (both empty where no point is).
    """

    study: str
    command: str
    metric: str
    better: Better = "lower"
    unit: str = "nats per token"
    difference: float
    seeds: tuple[int, ...]
    sweep: dict[str, tuple[str, ...]]
    arms: tuple[ArmRow, ...]
    runs: tuple[RunRow, ...]
    fixed_point: str = ""
    fixed: tuple[ArmRow, ...] = ()

    @property
    def measure(self) -> Measure:
        """What the arms are compared by."""
        split, _, name = self.metric.partition(" ")
        return Measure(name=name, split="test" if split == "test" else "validation", better=self.better, unit=self.unit)

    @property
    def decimals(self) -> int:
        """Decimals that tell the arms apart: four, more where all values are below 0.1, one from a thousand on."""
        largest = max((abs(row.mean) for row in self.arms if row.mean is not None), default=0.0)
        size = math.floor(math.log10(largest)) if 0 < largest < math.inf else 0
        return 1 if size >= 3 else max(4, 3 - size)

    def plain(self) -> dict[str, Any]:
        """JSON values."""
        return json.loads(self.model_dump_json())


def read_comparison(folder: Path, difference: float = 0.01, metric: str | None = None) -> Comparison:
    """Read what the runs in a study's folder show.

    Args:
        folder: the study.
        difference: in the metric's unit; how many seeds would be needed to see one as large.
        metric: `loss` or the task's metric by name; by default the task's metric where it has one.

    Raises:
        InputError: no study, none of its runs has finished, or they report no such metric.
    """
    study = open_study(folder)
    measure, outcomes = read_outcomes(study, metric)
    return compare_outcomes(study, measure, outcomes, difference)


def read_outcomes(study: KnownStudy, metric: str | None = None) -> tuple[Measure, list[Outcome]]:
    """What a study is judged by, and how every run of it stands.

    Raises:
        InputError: none has finished, or they report no such metric.
    """
    found = [read_cell(study, cell) for cell in study.cells]
    _check_finished(study, found)
    measure = measure_of(study, found, metric)
    outcomes = without_others(measure, found)
    _check_finished(study, outcomes)
    return measure, outcomes


def _check_finished(study: KnownStudy, outcomes: Sequence[Outcome]) -> None:
    if not any(o.state == "finished" for o in outcomes):
        counted = Counter(o.state for o in outcomes)
        first = next((f"; {o.cell.label}: {o.note}" for o in outcomes if o.note), "")
        states = ", ".join(f"{n} {state}" for state, n in sorted(counted.items()))
        raise InputError(f"{study.folder}: no run has finished ({states}), so there is nothing to compare{first}")


def compare_outcomes(
    study: KnownStudy, measure: Measure, outcomes: Sequence[Outcome], difference: float = 0.01
) -> Comparison:
    """The table of what the runs of a study show."""
    chosen = {arm: _best_point(study, measure, arm, outcomes) for arm in study.plan.arms}
    fixed = _own_point(study)
    everywhere = dict.fromkeys(study.plan.arms, fixed)
    return Comparison(
        study=study.folder.resolve().name,  # `.` has no name of its own
        command=study.plan.command,
        metric=measure.title,
        better=measure.better,
        unit=measure.unit,
        difference=difference,
        seeds=study.plan.seeds,
        sweep=study.plan.sweep,
        arms=tuple(_rows(study, measure, outcomes, chosen, difference)),
        runs=tuple(_run_row(o) for o in outcomes),
        fixed_point=fixed,
        fixed=tuple(_rows(study, measure, outcomes, everywhere, difference)) if fixed else (),
    )


def _own_point(study: KnownStudy) -> str:
    """The sweep point that changes nothing of the shared recipe; empty where there is none."""
    base = study.plan.base
    kept = (
        point
        for point, settings in study.points.items()
        if settings and apply_overrides(base, [f"{key}={value}" for key, value in settings.items()]) == base
    )
    return next(kept, "")


def _best_point(study: KnownStudy, measure: Measure, arm: str, outcomes: Sequence[Outcome]) -> str:
    """The sweep point with the most finished seeds, and among these the best mean on the validation split."""

    def rank(point: str) -> tuple[int, float]:
        values = [
            measure.badness(value)
            for o in outcomes
            if (o.cell.arm, o.cell.point, o.state) == (arm, point, "finished")
            and (value := measure.chosen_on(o)) is not None
        ]
        return -len(values), sum(values) / len(values) if values else 0.0

    return min(study.points, key=rank)


def _rows(
    study: KnownStudy, measure: Measure, outcomes: Sequence[Outcome], chosen: dict[str, str], difference: float
) -> list[ArmRow]:
    shown = {arm: [o for o in outcomes if (o.cell.arm, o.cell.point) == (arm, chosen[arm])] for arm in study.plan.arms}
    values = {
        arm: {o.cell.seed: value for o in found if o.state == "finished" and (value := measure.of(o)) is not None}
        for arm, found in shown.items()
    }
    reference = study.plan.arms[0]
    paired, corrected = pair_arms(values)
    rows: list[ArmRow] = []
    for arm, found in shown.items():
        counts = Counter(o.state for o in found)
        finished = [o for o in found if o.state == "finished"]
        row: dict[str, Any] = {"arm": arm, "point": chosen[arm], "counts": dict(sorted(counts.items()))}
        numbers = list(values[arm].values())
        if numbers:
            row["mean"] = sum(numbers) / len(numbers)
            row["parameters"] = finished[0].parameters
        if len(numbers) > 1:
            row["low"], row["high"] = t_interval(numbers)
        if times := [o.seconds for o in finished if o.seconds is not None]:
            row["seconds"] = median(times)
        if arm in paired:
            row["paired"], row["p_holm"] = paired[arm], corrected.get(arm)
            states = counts, Counter(o.state for o in shown[reference])
            row["verdict"] = _judge(verdict(paired[arm], corrected.get(arm), better=measure.better), *states)
            if deviation := paired[arm].deviation:
                row["needed_seeds"] = needed_pairs(difference, deviation, alpha=ALPHA / len(corrected))
        rows.append(ArmRow(**row))
    return rows


def pair_arms(values: Mapping[str, Mapping[int, float]]) -> tuple[dict[str, Paired], dict[str, float]]:
    """Differences of every arm (arm → seed → value) to the first, seed by seed, and p values of the t test by Holm."""
    reference, *others = values
    paired = {
        arm: compare_paired([v - values[reference][s] for s, v in values[arm].items() if s in values[reference]])
        for arm in others
    }
    tested = {arm: p for arm, found in paired.items() if (p := found.p_t) is not None}
    return paired, dict(zip(tested, holm(list(tested.values())), strict=True))


def _judge(found: Verdict, counts: Counter[str], reference: Counter[str]) -> Verdict:
    """The verdict on an arm whose runs, and the reference's, ended as counted.

    Where runs diverged or failed the rest is a selection, so that alone cannot make an arm better (or the reference, if
    it is the one whose runs are missing).
    """
    for favoured, here, whose in (("better", counts, "its"), ("worse", reference, "the reference's")):
        if lost := here["diverged"] + here["failed"]:
            what = " or ".join(state for state in ("diverged", "failed") if here[state])
            missing = f"{lost} of {whose} {sum(here.values())} runs {what}"
            if found.outcome == favoured:
                return Verdict(outcome="unknown", text=f"no verdict: {missing}; the others: {found.text}")
            found = Verdict(outcome=found.outcome, text=f"{found.text} ({missing})")
    return found


def _run_row(outcome: Outcome) -> RunRow:
    cell = outcome.cell
    return RunRow(
        arm=cell.arm,
        point=cell.point,
        seed=cell.seed,
        state=outcome.state,
        note=outcome.note,
        validation_loss=outcome.validation_loss,
        test_loss=outcome.test_loss,
        validation_metric=outcome.extra.get(f"validation_{outcome.metric}"),
        test_metric=outcome.extra.get(f"test_{outcome.metric}"),
        seconds=outcome.seconds,
    )
