"""A report over studies: one HTML page, or the same numbers as Markdown or CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from normsmith.errors import InputError
from normsmith.report.account import Account, read_account
from normsmith.report.grid import Grid, escaped, markdown_lines
from normsmith.report.page import template
from normsmith.report.pictures import Picture
from normsmith.report.results import write_text
from normsmith.report.robustness_tables import corruptions_grid, robustness_grid
from normsmith.report.study_tables import (
    arms_grid,
    cost_grid,
    counted,
    decode_grid,
    differing_grid,
    fixed_grid,
    further_grid,
    lost_runs,
    published_grid,
    result_grid,
    runs_grid,
    statistics_grid,
)
from normsmith.studies.tables import csv_rows, notes

KINDS = (".html", ".md", ".csv")
_MARKS = ('<p class="over">normsmith report</p>', "<!-- normsmith report -->", "study,arm,point,finished,diverged,")
"""By these we know our own reports again: nothing else is ever replaced."""


@dataclass(frozen=True)
class _Page:
    """One study on the page."""

    account: Account
    prefix: str
    first: Sequence[Grid]
    second: Sequence[Grid]
    arms: Grid
    runs: Grid
    differing: Grid | None
    notes: Sequence[str]
    lost: Sequence[str]
    counted: str
    pictures: Sequence[Picture] = ()
    diagnostics: Sequence[Picture] = ()


def write_study_report(
    folders: Sequence[Path], output: Path, difference: float = 0.01, metric: str | None = None
) -> list[Account]:
    """Write what studies show to one file, HTML, Markdown or CSV by its suffix, and return what was read.

    Args:
        folders: the studies.
        output: the file; it may lie in a study. Only a report of ours is replaced.
        difference: in the metric's unit; how many seeds would be needed to see one as large.
        metric: `loss` or the task's metric by name; by default the task's metric where it has one.

    Raises:
        InputError: another suffix, a file that is not ours or cannot be written, a study named twice, or what
            `read_account` refuses.
    """
    check_output(folders, output)
    accounts = [read_account(folder, difference, metric) for folder in folders]
    if output.suffix == ".html":
        text = _html(accounts)
    elif output.suffix == ".md":
        text = markdown_report(accounts)
    else:
        text = csv_report(accounts)
    write_text(output, text)
    return accounts


def check_output(folders: Sequence[Path], output: Path) -> None:
    """Refuse a file that cannot be written or is not ours, before anything is read."""
    if output.suffix not in KINDS:
        raise InputError(f"{output}: write a file that ends in {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    resolved = [folder.resolve() for folder in folders]
    if repeated := next((folder for folder in folders if resolved.count(folder.resolve()) > 1), None):
        raise InputError(f"{repeated}: the study is there twice")
    if output.is_dir():
        raise InputError(f"{output}: is a folder, expected a file to write to")
    above = next(path for path in output.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(f"{output}: cannot be written (no permission to write to {above})")
    if output.exists():
        try:
            ours = any(mark in output.read_text(encoding="utf-8") for mark in _MARKS)
        except (OSError, UnicodeDecodeError):
            ours = False
        if not ours:
            raise InputError(f"{output}: exists and is no report over studies, so it stays; name another file")


def _html(accounts: Sequence[Account]) -> str:
    prefixes = [f"s{i}-" for i in range(1, len(accounts) + 1)] if len(accounts) > 1 else [""]
    pages = [_page(account, prefix, pictures=True) for account, prefix in zip(accounts, prefixes, strict=True)]
    return template("study.html.jinja").render(pages=pages, title=_title(accounts), summary=_summary(accounts))


def _title(accounts: Sequence[Account]) -> str:
    names = ", ".join(account.name for account in accounts)
    return accounts[0].title if len(accounts) == 1 else f"{len(accounts)} studies: {names}"


def _summary(accounts: Sequence[Account]) -> str:
    return " ".join(account.summary for account in accounts)


def _page(account: Account, prefix: str, pictures: bool) -> _Page:
    outcome: list[Picture] = []
    diagnostics: list[Picture] = []
    if pictures:
        # matplotlib takes most of a second to import, and Markdown has no use for it.
        from normsmith.report.study_pictures import study_pictures

        outcome, diagnostics = study_pictures(account)
    second = (statistics_grid, robustness_grid, corruptions_grid, published_grid, further_grid, cost_grid, decode_grid)
    return _Page(
        account=account,
        prefix=prefix,
        first=[result_grid(account), *([fixed] if (fixed := fixed_grid(account)) else [])],
        second=[grid for make in second if (grid := make(account)) is not None],
        arms=arms_grid(account),
        runs=runs_grid(account),
        differing=differing_grid(account),
        notes=notes(account.comparison, runs=False),
        lost=lost_runs(account),
        counted=counted(account),
        pictures=outcome,
        diagnostics=diagnostics,
    )


def markdown_report(accounts: Sequence[Account]) -> str:
    """The page's tables and texts in GitHub's Markdown."""
    parts = ["<!-- normsmith report -->\n"]
    for account in accounts:
        page = _page(account, "", pictures=False)
        parts.append(f"# {escaped(account.title)}\n\n{escaped(account.summary)}\n")
        parts += [_section(grid) for grid in page.first]
        parts.append("".join(f"- {escaped(note)}\n" for note in page.notes))
        parts += [_section(grid) for grid in page.second]
        parts.append(f"## What was run\n\nRuns finished: {escaped(page.counted)}.\n\n{markdown_lines(page.arms)}")
        parts.append(_fenced("yaml", yaml.safe_dump(account.study.plan.base, sort_keys=False, allow_unicode=True)))
        parts.append(_section(page.runs))
        if page.lost:
            lines = "".join(f"- {escaped(line)}\n" for line in page.lost)
            parts.append(f"## Runs that do not count, or are damaged\n\n{lines}")
        facts = "".join(f"- {escaped(key)}: {escaped(value)}\n" for key, value in account.environment[0].items())
        command = _fenced("text", " ".join(account.study.plan.command.split()) or "not recorded")
        parts.append(f"## How to repeat it\n\n{command}\n{facts}")
        if page.differing:
            parts.append(_section(page.differing))
    return "\n".join(parts)


def _section(grid: Grid) -> str:
    note = f"\n{escaped(grid.note)}\n" if grid.note else ""
    return f"## {escaped(grid.title)}\n\n{markdown_lines(grid)}{note}"


def _fenced(language: str, text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def csv_report(accounts: Sequence[Account]) -> str:
    """One line per study and arm with every number, published ones in columns of their own."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    # Beside the columns that every study has: what only some measured, and what others reported.
    metrics = list(dict.fromkeys(m for a in accounts for m in a.measured if m != a.comparison.metric))
    reported = list(dict.fromkeys(p.metric for a in accounts for p in a.published))
    extra = [*(f"measured {name}" for name in metrics), *(f"published {name}" for name in reported)]
    for i, account in enumerate(accounts):
        head, *rows = csv_rows(account.comparison)
        if not i:
            writer.writerow(["study", *head, "peak_memory_bytes", *extra])
        figures = {(p.arm, p.metric): p.value for p in account.published}
        for row in rows:
            arm = str(row[0])
            measured = [account.measured.get(name, {}).get(arm) for name in metrics]
            published = [figures.get((arm, name)) for name in reported]
            writer.writerow([account.name, *row, account.memory.get(arm), *measured, *published])
    return out.getvalue()
