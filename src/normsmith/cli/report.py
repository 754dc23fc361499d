"""`normsmith report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import DifferenceOption, JsonFlag, MetricOption, emit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def report(
    studies: Annotated[list[Path], typer.Argument(help="Study folders, as `normsmith compare` makes them.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File: .html, .md or .csv [report.html in the first study].")
    ] = None,
    metric: MetricOption = None,
    difference: DifferenceOption = 0.01,
    as_json: JsonFlag = False,
) -> None:
    """Write what one study or several show, from their folders alone: no model is loaded, nothing is trained.

    The page holds results with intervals and tests, published figures beside them (STUDY/published.json), learning
    curves, stability over a sweep, everything else that the runs logged, costs, and the commands that repeat it all. It
    is one file that needs no network. Markdown and CSV hold the same numbers. docs/reports.md explains the files.

    Studies of tasks with a metric (accuracy, rmse) are judged by it, all others by the loss; --metric loss takes the
    loss everywhere. --difference is in the unit of what decides.

    Example: normsmith report runs/study -o runs/study/report.html
    """
    from normsmith.report.study_page import write_study_report

    path = output or studies[0] / "report.html"
    accounts = write_study_report(studies, path, difference, metric)
    found = {
        "output": str(path),
        "studies": [account.comparison.plain() for account in accounts],
    }
    emit(found, as_json, lambda: "\n".join([*(f"{a.name}: {a.summary}" for a in accounts), "", f"Report: {path}"]))
