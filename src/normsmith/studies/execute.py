"""Carry out the runs of a study: one after another here, or several at once in processes of their own."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Protocol

from normsmith.errors import DivergedError, InputError
from normsmith.studies.cells import FAILURE, read_cell, record_failure
from normsmith.studies.locks import guard
from normsmith.studies.runner import run_recipe
from normsmith.studies.study import Cell, Study
from normsmith.studies.tasks import Data
from normsmith.training import Reporter
from normsmith.training.progress import Task

POLL_SECONDS = 0.5
Tell = Callable[[Cell, int], None]
"""Called with a run and its completed steps."""


class Executor(Protocol):
    """Where runs are carried out.

    `run` returns when no run is open any more, whoever did it. It takes no run without its lock, and leaves each either
    finished or with its failure recorded; only an interruption of the whole study leaves runs open.
    """

    def run(self, study: Study, data: Data, progress: StudyProgress) -> None:
        """Carry out every run that is open."""
        ...


class StudyProgress:
    """One task over all runs, counted in optimiser steps; a line for each run that ends."""

    def __init__(self, reporter: Reporter, study: Study) -> None:
        self.reporter, self.study = reporter, study
        self.each = study.plan.base.training.max_steps
        self._steps = {cell.label: 0 for cell in study.cells}
        self._ended: set[str] = set()
        self._said: set[str] = set()
        for cell in study.cells:
            if read_cell(study, cell).state != "open":
                self._end(cell)
        self._task = reporter.task(study.folder.name, self.each * len(study.cells))
        self._task.start_at(sum(self._steps.values()))

    def tell(self, cell: Cell, step: int) -> None:
        """`step` steps of a run are complete."""
        self._steps[cell.label] = min(step, self.each - 1)  # it ends with its evaluation
        self._show(cell.label)

    def say_once(self, message: str) -> None:
        """One line, however often it is said."""
        if message not in self._said:
            self._said.add(message)
            self.reporter.say(message)

    def ended(self, cell: Cell) -> None:
        """A run has its result, or has failed."""
        outcome = read_cell(self.study, cell)
        named = f"validation_{outcome.metric}"
        value, what = outcome.extra.get(named), f"validation {outcome.metric}"
        if value is None:
            value, what = outcome.validation_loss, "validation loss"
        said = outcome.note if value is None else f"{what} {value:.4f}"
        self.reporter.say(f"{cell.label}: {outcome.state}  {said}")
        self._end(cell)
        self._show(cell.label)

    def _end(self, cell: Cell) -> None:
        self._ended.add(cell.label)
        self._steps[cell.label] = self.each

    def _show(self, label: str) -> None:
        note = f"{len(self._ended)} of {len(self._steps)} runs, {label}"
        self._task.update(sum(self._steps.values()), note)


class _Relay(Reporter):
    """Passes on how far one run is, and nothing else: the study has one bar for all of them."""

    def __init__(self, cell: Cell, tell: Tell) -> None:
        super().__init__(quiet=True)
        self.cell, self.tell = cell, tell

    def task(self, description: str, total: int) -> Task:
        return _RelayTask(self, description, total)


class _RelayTask(Task):
    def __init__(self, relay: _Relay, description: str, total: int) -> None:
        super().__init__(relay, description, total)
        self._relay = relay

    def update(self, done: int, note: str = "") -> None:
        self._relay.tell(self._relay.cell, done)


def carry_out(study: Study, cell: Cell, data: Data, tell: Tell) -> bool:
    """Do one run if it is open and nobody else has it; whether it was done here.

    Raises:
        InputError: `data` are not what the study's runs read; nothing was begun.
    """
    if data.data_hash != study.plan.data_sha256:
        raise InputError(
            f"{data.source}: {platform.node()} reads other data than {study.folder.name} had when it was begun, so its "
            "run would not count; bring the data of the study there, or start it anew in another folder"
        )
    lock = study.lock(cell)
    if not lock.take():
        return False
    try:
        if read_cell(study, cell).state != "open":
            return False
        try:
            run_recipe(
                cell.recipe, cell.folder, _Relay(cell, tell), resume=True, data=data, start=cell.start
            )  # resumed from the newest checkpoint, or from the beginning where there is none
        except DivergedError as error:
            record_failure(cell, "diverged", str(error))
        except Exception as error:  # one run must not take the others with it, whatever went wrong
            record_failure(cell, "failed", f"{type(error).__name__}: {' '.join(str(error).split())}")
        return True
    finally:
        lock.give()


def open_runs(study: Study) -> list[Cell]:
    """The runs that are still to be done, by us or by others."""
    return [cell for cell in study.cells if read_cell(study, cell).state == "open"]


def forget_failures(study: Study) -> None:
    """Open the failed runs again; a run that diverged would diverge again."""
    for cell in study.cells:
        with guard(study.folder):
            if read_cell(study, cell).state == "failed" and study.lock(cell).owner() is None:
                (cell.folder / FAILURE).unlink()


class Here:
    """One run after another in this process."""

    def run(self, study: Study, data: Data, progress: StudyProgress) -> None:
        """Carry out what is open; wait for what other processes have."""
        while left := open_runs(study):
            done = False
            for cell in left:
                if carry_out(study, cell, data, progress.tell):
                    progress.ended(cell)
                    done = True
            if not done:
                wait(study, left, progress)


def wait(study: Study, left: list[Cell], progress: StudyProgress) -> None:
    """Give the processes that have the remaining runs some time; the first call says who they are."""
    owner = study.lock(left[0]).owner()
    if owner is not None:
        progress.say_once(
            f"waiting for {left[0].label}, which process {owner.get('pid')} on {owner.get('host')} has; "
            f"if that is gone, delete {study.lock(left[0]).path}"
        )
    time.sleep(POLL_SECONDS)
