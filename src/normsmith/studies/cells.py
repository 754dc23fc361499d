"""What became of each run of a study, read from its folder alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from normsmith.folders import prepare_folder
from normsmith.report.results import write_text
from normsmith.studies.files import ENVIRONMENT, FAILURE, METRICS, RECIPE, RESULT

if TYPE_CHECKING:
    from normsmith.studies.checked import KnownCell, KnownStudy
    from normsmith.studies.study import Cell, Study

State = Literal["finished", "open", "diverged", "failed", "refused"]
Better = Literal["higher", "lower"]
Entry = dict[str, Any]
"""One line of metrics.jsonl; a number that was not finite is None."""


@dataclass(frozen=True)
class Outcome:
    """How one run stands.

    `open` runs have not begun or can be continued; `refused` ones are in the way: their folder is not what the study
    wrote. `note` says why a run does not count, or what is damaged about one that does;
    `entries` is what a finished run logged, `extra` the further numbers of its result; `metric` names what the task
    reports beside the loss, whose values (`validation_METRIC`, `test_METRIC`) are among these, and `better` which ones
    are better.
    """

    cell: Cell | KnownCell
    state: State
    note: str = ""
    validation_loss: float | None = None
    test_loss: float | None = None
    parameters: int | None = None
    seconds: float | None = None
    entries: Sequence[Entry] = field(default=(), repr=False, compare=False)
    extra: Mapping[str, float] = field(default_factory=dict[str, float], repr=False, compare=False)
    metric: str = ""
    better: Better = "lower"


def read_cell(study: Study | KnownStudy, cell: Cell | KnownCell) -> Outcome:
    """How a run stands; whatever does not fit the study is refused with the reason, never counted."""
    folder = cell.folder
    if not folder.is_dir() or not any(folder.iterdir()):
        return Outcome(cell, "open")
    if not (folder / ".normsmith").exists():
        return Outcome(cell, "refused", "the folder was not written by normsmith")
    recipe = _text(folder / RECIPE)
    if recipe is not None and not cell.fits(recipe):
        return Outcome(cell, "refused", "its recipe.yaml is not that of this study: another study's, or edited by hand")
    facts = read_object(folder / ENVIRONMENT)
    if recipe is not None and facts is not None and facts.get("data_sha256") != study.plan.data_sha256:
        return Outcome(cell, "refused", "it read other data than the study")
    if facts is not None and facts.get("normsmith") != study.plan.normsmith:
        return Outcome(cell, "refused", f"it was made by normsmith {facts.get('normsmith')}")
    if (folder / FAILURE).exists():
        failure = read_object(folder / FAILURE) or {}
        diverged = failure.get("state") == "diverged"
        return Outcome(cell, "diverged" if diverged else "failed", str(failure.get("error", "no reason recorded")))
    if not (folder / RESULT).exists():
        return Outcome(cell, "open")
    if recipe is None or facts is None:
        return Outcome(
            cell, "refused", "recipe.yaml or environment.json is missing or cannot be read beside its result"
        )
    return _finished(study, cell)


def _finished(study: Study | KnownStudy, cell: Cell | KnownCell) -> Outcome:
    result = read_object(cell.folder / RESULT)
    if result is None:
        return Outcome(cell, "refused", f"{RESULT} cannot be read: cut short, or edited by hand")
    swept = study.test_split
    losses = [_number(result.get(name)) for name in ("validation_loss", *(["test_loss"] if swept else []))]
    parameters, seconds = _number(result.get("parameters")), _number(result.get("seconds"))
    if None in losses or parameters is None or seconds is None:
        return Outcome(cell, "refused", f"{RESULT} holds no finite loss, or lacks a number")
    entries, damage = read_metrics(cell.folder / METRICS)
    return Outcome(
        cell,
        "finished",
        damage,
        validation_loss=losses[0],
        test_loss=losses[-1] if swept else None,
        parameters=int(parameters),
        seconds=None if result.get("resumed") else seconds,  # it is then the time of the last part only
        entries=entries,
        extra=_further(result),
        metric=str(result.get("metric", "")),
        better="higher" if result.get("better") == "higher" else "lower",
    )


def _further(result: dict[str, Any]) -> dict[str, float]:
    """Numbers of a result that every run need not have; a task's metric is called by its name."""
    known = {"validation_loss", "test_loss", "parameters", "seconds"}
    name = str(result.get("metric", "metric"))
    numbers = {key: _number(value) for key, value in result.items() if key not in known}
    return {key.replace("_metric", f"_{name}"): value for key, value in numbers.items() if value is not None}


def read_metrics(path: Path) -> tuple[list[Entry], str]:
    """The logged steps in order, and what is wrong with the file, if anything.

    A last line that a killed process cut short is left out; from any other illegible line on nothing is believed.
    """
    text = _text(path)
    if text is None:
        return [], f"{path.name} is missing"
    entries: list[Entry] = []
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if not line:
            continue
        try:
            entry: Any = _DECODER.decode(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or not isinstance(cast("Any", entry).get("step"), int):
            cut = i == len(lines) - 1
            return entries, f"{path.name}: " + ("the last line is cut" if cut else f"line {i + 1} is illegible")
        entries.append(cast("Entry", entry))
    return entries, ""


# NaN and the infinities are no JSON; Python's reader would let them through as numbers.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def record_failure(cell: Cell, state: Literal["diverged", "failed"], error: str) -> None:
    """Keep a run that did not finish, with its last line of error."""
    prepare_folder(cell.folder, overwrite=False, resume=True)  # a run can fail before it has a folder
    last = next((line.strip() for line in reversed(error.splitlines()) if line.strip()), "no message")
    write_text(cell.folder / FAILURE, json.dumps({"state": state, "error": last}, indent=1) + "\n")


def _number(value: Any) -> float | None:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    return number if math.isfinite(number) else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        loaded: Any = json.loads(_text(path) or "")
    except ValueError:
        return None
    return cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else None
