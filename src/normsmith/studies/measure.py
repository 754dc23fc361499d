"""What a study is judged by: the loss, or the metric that its task reports beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from normsmith.config import Config
from normsmith.errors import InputError
from normsmith.studies.cells import Better, Outcome
from normsmith.studies.files import RESULT

if TYPE_CHECKING:
    from normsmith.studies.checked import KnownStudy

LOSS = "loss"
_LOSS_UNITS = {
    "text": "nats per token",
    "tagging": "nats per token",
    "images": "nats",
    "sentences": "nats",
    "table": "variances of the target",
}
_UNITS = {"rmse": "units of the target"}  # an accuracy is a share and has none


class Measure(Config):
    """One number of each run.

    Attributes:
        name: `loss`, or the task's metric.
        split: the part of the data on which runs are compared; what is swept is chosen on the validation split.
        better: which values of it are better.
        unit: of the values; empty for a share.
    """

    name: str = LOSS
    split: Literal["validation", "test"] = "validation"
    better: Better = "lower"
    unit: str = _LOSS_UNITS["text"]

    @property
    def title(self) -> str:
        """`validation loss`, `test accuracy` …"""
        return f"{self.split} {self.name}"

    @property
    def quantity(self) -> str:
        """The title with the unit, for an axis."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def best(self) -> str:
        """`lowest` or `highest`."""
        return "lowest" if self.better == "lower" else "highest"

    def is_called(self, name: str) -> bool:
        """Whether a published figure of that name is this number; of a loss the split must be named."""
        return name.casefold() in (self.title, *([] if self.name == LOSS else [self.name]))

    def amount(self, value: float) -> str:
        """A difference of that size, with its unit."""
        return f"{value:g} {self.unit}".strip()

    def badness(self, value: float) -> float:
        """The value, turned over where higher is better, so that the smallest is the best."""
        return value if self.better == "lower" else -value

    def chosen_on(self, outcome: Outcome) -> float | None:
        """The number on the validation split."""
        return outcome.validation_loss if self.name == LOSS else self._metric(outcome, "validation")

    def of(self, outcome: Outcome) -> float | None:
        """The number that counts."""
        if self.name == LOSS:
            return outcome.validation_loss if outcome.test_loss is None else outcome.test_loss
        return self._metric(outcome, self.split)

    def _metric(self, outcome: Outcome, split: str) -> float | None:
        return outcome.extra.get(f"{split}_{self.name}") if outcome.metric == self.name else None


def measure_of(study: KnownStudy, outcomes: Sequence[Outcome], asked: str | None = None) -> Measure:
    """What a study is judged by: what is asked for, else its task's metric, else the loss.

    Args:
        study: that the runs belong to.
        outcomes: how its runs stand.
        asked: `loss` or the name of a metric.

    Raises:
        InputError: the runs report no such metric.
    """
    kind = str(study.plan.base.get("data", {}).get("kind", "text"))
    split = "test" if study.test_split else "validation"
    reported: dict[str, Better] = {o.metric: o.better for o in outcomes if o.state == "finished" and o.metric}
    # A language model's loss says it all, so a number that its runs hold besides is looked at only if asked for.
    name = asked or (next(iter(reported), LOSS) if kind != "text" else LOSS)
    if name == LOSS:
        return Measure(split=split, unit=_LOSS_UNITS.get(kind, "nats"))
    if name not in reported:
        known = " or ".join([LOSS, *reported])
        raise InputError(f"{study.folder}: its runs report no metric {name!r}; write --metric {known}")
    return Measure(name=name, split=split, better=reported[name], unit=_UNITS.get(name, ""))


def without_others(measure: Measure, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, with finished runs refused that lack the number by which the study is judged."""
    return [
        Outcome(o.cell, "refused", f"{RESULT} holds no finite {measure.title}")
        if o.state == "finished" and None in (measure.of(o), measure.chosen_on(o))
        else o
        for o in outcomes
    ]
