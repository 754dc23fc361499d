"""Write the report: one HTML file that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml

from normsmith.report.palette import decode_stroke, strokes
from normsmith.report.results import Results, write_text
from normsmith.report.table import NOTHING, number, result_table


def write_report(results: Results, path: str | Path) -> Path:
    """Write `results` as one self-contained HTML page and return its path.

    Equal results give equal bytes. A path that cannot be written raises `InputError`.
    """
    # matplotlib takes most of a second to import, and reading results or printing a table has no use for it.
    from normsmith.report.pictures import pictures

    known = strokes(results)
    page = template("page.html.jinja")
    return write_text(
        path,
        page.render(
            results=results,
            title=results.title,
            summary=results.summary,
            plain=results.plain(),
            table=result_table(results),
            pictures=pictures(results),
            strokes=known,
            decode=[(row, decode_stroke(row.name, known)) for row in results.decode],
            nothing=NOTHING,
        ),
    )


def template(name: str) -> jinja2.Template:
    """A page's template; all that is filled in is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("normsmith", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(yaml=_yaml, number=number)
    return environment.get_template(name)


def _yaml(value: dict[str, Any]) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100).rstrip()
