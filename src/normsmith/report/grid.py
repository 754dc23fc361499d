"""Tables of any content: the same cells for the page and for Markdown."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

NOTHING = "–"


@dataclass(frozen=True)
class Heading:
    """A column: `number` decides alignment and sorting, `published` marks figures that are not ours."""

    title: str
    number: bool = True
    published: bool = False


@dataclass(frozen=True)
class Entry:
    """What is shown and what to sort by (None sorts last); `arm` adds that arm's colour, `badge` a short warning."""

    text: str
    value: float | str | None = None
    arm: str = ""
    badge: str = ""
    code: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: its name in the page, its title, and what a reader must know of it."""

    name: str
    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[Entry, ...], ...]
    note: str = ""


def words(text: str, arm: str = "", badge: str = "") -> Entry:
    """A cell of text."""
    return Entry(text or NOTHING, text or None, arm, badge)


def figure(value: float | None, form: str = "{:,.4f}", text: str | None = None) -> Entry:
    """A cell with a number, shown as `text` or by `form` with a true minus; nothing where there is none."""
    if value is None:
        return Entry(NOTHING)
    if not math.isfinite(value):
        return Entry("not finite")
    return Entry((form.format(value) if text is None else text).replace("-", "−"), value)


def interval(low: float | None, high: float | None, form: str = "{:+.4f}", middle: float | None = None) -> Entry:
    """A cell with `[low, high]`, after the middle where one is given; sorted by the middle, or by the lower end."""
    if low is None or high is None:
        return figure(middle, form)
    ends = f"[{form.format(low)}, {form.format(high)}]"
    text = ends if middle is None else f"{form.format(middle)} {ends}"
    return Entry(text.replace("-", "−"), low if middle is None else middle)


def probability(value: float | None) -> Entry:
    """A cell with a p value."""
    return figure(value, "{:.3f}", "< 0.001" if value is not None and value < 0.001 else None)


def without_empty(grid: Grid) -> Grid:
    """The grid without number columns in which no row has anything to show."""
    shown = [any(row[i].text != NOTHING for row in grid.rows) for i in range(len(grid.headings))]
    used = [i for i, heading in enumerate(grid.headings) if shown[i] or not heading.number]
    rows = tuple(tuple(row[i] for i in used) for row in grid.rows)
    return Grid(grid.name, grid.title, tuple(grid.headings[i] for i in used), rows, grid.note)


def markdown_lines(grid: Grid) -> str:
    """The grid in GitHub's Markdown, ending in a newline."""
    titles = [heading.title + (" (published)" if heading.published else "") for heading in grid.headings]
    lines: list[Sequence[str]] = [titles, ["---:" if heading.number else "---" for heading in grid.headings]]
    lines += [[_cell(entry) for entry in row] for row in grid.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(entry: Entry) -> str:
    text = escaped(entry.text) if not entry.code else f"<code>{escaped(entry.text)}</code>"
    return f"{text} ({escaped(entry.badge)})" if entry.badge else text


def escaped(text: str) -> str:
    """Text as one line of Markdown that shows it and does nothing else."""
    safe = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{character}" if character in "\\`*_[]|" else character for character in safe)
