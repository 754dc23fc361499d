"""The main result table: one line per arm, the same cells for the page and for Markdown."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass

from normsmith.report.results import Arm, Results

NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """A numeric column; `quality` columns say "diverged" where a diverged arm has no number."""

    title: str
    value: Callable[[Arm], float | None]
    text: Callable[[float], str]
    quality: bool = False


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number to sort by (None sorts last)."""

    text: str
    value: float | None


@dataclass(frozen=True)
class Table:
    """Column titles and, per arm, the cells under them."""

    titles: tuple[str, ...]
    rows: tuple[tuple[Arm, tuple[Cell, ...]], ...]


def result_table(results: Results) -> Table:
    """Lay out all arms; a column in which no arm has anything to show is left out."""
    ratios = {row.name: row.ratio for row in results.decode}
    columns = (
        Column("Validation loss", lambda arm: arm.validation_loss, "{:.4f}".format, quality=True),
        Column("Perplexity", lambda arm: arm.perplexity, "{:,.2f}".format, quality=True),
        Column("Gap", lambda arm: arm.gap_percent, signed_percent, quality=True),
        Column("Fold error", lambda arm: arm.fold_error, "{:.1e}".format),
        Column("Decode ratio", lambda arm: ratios.get(arm.name), "{:.2f}×".format),
        Column("Parameters", lambda arm: arm.parameters, "{:,.0f}".format),
        Column("Time", lambda arm: arm.seconds, duration),
    )
    used = [column for column in columns if any(_cell(column, arm).text != NOTHING for arm in results.arms)]
    rows = ((arm, tuple(_cell(column, arm) for column in used)) for arm in results.arms)
    return Table(tuple(column.title for column in used), tuple(rows))


def _cell(column: Column, arm: Arm) -> Cell:
    value = column.value(arm)
    if value is not None and math.isfinite(value):
        return Cell(column.text(value), value)
    if column.quality and arm.diverged:
        return Cell("diverged", None)
    return Cell(NOTHING if value is None else "not finite", None)


def markdown_table(results: Results) -> str:
    """The main result table in GitHub's Markdown, ending in a newline."""
    table = result_table(results)
    lines = [["Arm", *table.titles], ["---", *["---:"] * len(table.titles)]]
    lines += [[_markdown(arm.label), *(cell.text for cell in cells)] for arm, cells in table.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _markdown(text: str) -> str:
    escaped = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{character}" if character in "\\`*_[]|" else character for character in escaped)


def number(value: float, text: str = "{:,.0f}") -> str:
    """Format a number that may be infinite or not a number."""
    return text.format(value) if math.isfinite(value) else "not finite"


def signed_percent(value: float) -> str:
    """Two decimals, a sign (a true minus) and a unit; a value that rounds to zero has no sign."""
    rounded = round(value, 2)
    sign = "+" if rounded > 0 else "−" if rounded < 0 else ""
    return f"{sign}{abs(rounded):.2f} %"


def duration(seconds: float) -> str:
    """Two units at most: `0.8 s`, `42 s`, `3 min 20 s`, `5 h 07 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
