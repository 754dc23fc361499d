"""Progress of a run: a live bar with ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_PLAIN_SECONDS = 10.0  # between two lines where nobody can see a bar move


class Reporter:
    """Shows messages and tasks on one console; use it as a context manager.

    On a terminal tasks are live bars; elsewhere each task prints a line when it starts, every ten seconds, and when it
    ends, so that a log file stays readable.
    """

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._live = self.console.is_terminal and not quiet
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self._live,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, message: str) -> None:
        """One line for the user."""
        if not self.quiet:
            self.console.print(message, markup=False, soft_wrap=True)

    def bar(self, description: str, total: int) -> TaskID | None:
        """A live bar, or None where bars are not shown."""
        return self._bars.add_task(description, total=total, note="") if self._live else None

    def move(self, bar: TaskID, done: int, note: str) -> None:
        """Set a live bar; an empty note leaves the last one."""
        self._bars.update(bar, completed=done)
        if note:
            self._bars.update(bar, note=note)

    def task(self, description: str, total: int) -> Task:
        """Begin something that takes `total` steps."""
        return Task(self, description, total)


class Task:
    """One bar, or one sequence of lines; made by `Reporter.task`."""

    def __init__(self, reporter: Reporter, description: str, total: int) -> None:
        self._reporter, self.description, self.total = reporter, description, total
        self._started = self._printed = time.monotonic()
        self._first = 0
        self._bar = reporter.bar(description, total)

    def start_at(self, done: int) -> None:
        """Steps that were done before this run; they do not count for the remaining time."""
        self._first = done

    def update(self, done: int, note: str = "") -> None:
        """`done` steps are complete; `note` is shown beside them."""
        if self._bar is not None:
            self._reporter.move(self._bar, done, note)
            return
        now = time.monotonic()
        if done < self.total and now - self._printed < _PLAIN_SECONDS:
            return
        self._printed = now
        elapsed = now - self._started
        left = elapsed / max(done - self._first, 1) * (self.total - done)
        timing = f"{elapsed:.0f} s, {left:.0f} s left" if done < self.total else f"{elapsed:.0f} s"
        self._reporter.say(f"{self.description}: {done}/{self.total} ({timing}){'  ' + note if note else ''}")


class ProgressCallback(TrainerCallback):
    """Shows a Trainer's run as one task of a reporter; `loss` is what its training loss is called there."""

    def __init__(self, reporter: Reporter, description: str, loss: str = "loss") -> None:
        self.reporter, self.description, self.loss = reporter, description, loss
        self._task: Task | None = None
        self._note = ""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the bar."""
        self._task = self.reporter.task(self.description, state.max_steps)
        self._task.start_at(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar; the last step is shown by `on_train_end`, when its numbers have been logged."""
        if self._task is not None and state.global_step < state.max_steps:
            self._task.update(state.global_step, self._note)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the end with the last numbers."""
        if self._task is not None:
            self._task.update(state.global_step, self._note)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember the newest numbers as the note beside the bar."""
        shown = {"loss": self.loss, "gate": "gate", "eval_loss": "validation"}
        parts = [f"{shown[key]} {logs[key]:.3f}" for key in shown if logs and key in logs]
        if parts:
            self._note = ", ".join(parts)
