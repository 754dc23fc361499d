"""What a run shows: plain lines in a log file, a live bar on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from normsmith.surgery import taper_
from normsmith.training import ProgressCallback, Reporter, Trainer, progress
from tests.training.runs import STEPS, TAPER, arguments, small, windows


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made)
    return made


def written(terminal: bool, quiet: bool = False) -> tuple[Reporter, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, color_system=None, highlight=False)
    return Reporter(console, quiet=quiet), stream


def test_plain_lines_every_ten_seconds_with_the_time_left(clock: Clock) -> None:
    reporter, stream = written(terminal=False)
    with reporter:
        task = reporter.task("train", 100)
        for done, seconds in ((1, 4), (2, 4), (10, 12), (20, 1), (50, 13), (100, 10)):
            clock.now += seconds
            task.update(done, f"loss {done}")
    assert stream.getvalue().splitlines() == [
        "train: 10/100 (20 s, 180 s left)  loss 10",
        "train: 50/100 (34 s, 34 s left)  loss 50",
        "train: 100/100 (44 s)  loss 100",
    ]


def test_a_resumed_run_does_not_count_the_steps_before_it(clock: Clock) -> None:
    reporter, stream = written(terminal=False)
    task = reporter.task("train", 100)
    task.start_at(80)
    clock.now += 20
    task.update(90)
    assert stream.getvalue() == "train: 90/100 (20 s, 20 s left)\n"


def test_messages_are_printed_as_they_are() -> None:
    reporter, stream = written(terminal=False)
    long = "a/very/long/path/" * 20
    reporter.say(f"wrote [bold]{long}[/bold]")
    assert stream.getvalue() == f"wrote [bold]{long}[/bold]\n"


def test_a_live_bar_on_a_terminal() -> None:
    reporter, stream = written(terminal=True)
    with reporter:
        task = reporter.task("train", 4)
        for done in range(1, 5):
            task.update(done, "loss 1.5")
        task.update(4)
    shown = stream.getvalue()
    assert "\x1b[" in shown, "a bar redraws itself"
    last = [line for line in shown.splitlines() if "train" in line][-1]
    assert re.search(r"train .*━+ +4/4 +loss 1\.5 +0:00:0\d +left +0:00:00", last)
    assert "train: 4/4" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_prints_nothing(terminal: bool, clock: Clock) -> None:
    reporter, stream = written(terminal, quiet=True)
    with reporter:
        task = reporter.task("train", 2)
        clock.now += 60
        task.update(1)
        task.update(2)
        reporter.say("done")
    assert stream.getvalue() == ""


def test_a_run_reports_its_last_numbers(tmp_path: Path, capfd: Any) -> None:
    reporter, stream = written(terminal=False)
    model = small()
    trainer = Trainer(
        model,
        arguments(tmp_path, log_every=1),
        train_dataset=windows(),
        controller=taper_(model, TAPER),
        callbacks=[ProgressCallback(reporter, "taper")],
    )
    trainer.train()
    row = trainer.state.log_history[STEPS - 1]
    assert row["gate"] == 0
    (line,) = stream.getvalue().splitlines()
    assert re.fullmatch(rf"taper: 8/8 \(\d+ s\)  loss {row['loss']:.3f}, gate {row['gate']:.3f}", line)
    assert capfd.readouterr().out == "", "transformers' own printer is gone"
