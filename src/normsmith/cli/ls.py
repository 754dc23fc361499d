"""`normsmith ls`."""

from __future__ import annotations

from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, emit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def ls(
    what: Annotated[
        str | None, typer.Argument(help="norms, connections, schedules, presets, recipes or suites.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List what can be named in recipes and commands.

    Example: normsmith ls norms
    """
    from normsmith.errors import UnknownNameError
    from normsmith.studies.library import listing

    known = listing()
    if what is not None and what not in known:
        raise UnknownNameError("list", what, known)
    chosen = known if what is None else {what: known[what]}

    def text() -> str:
        lines: list[str] = []
        for title, entries in chosen.items():
            width = max(len(name) for name in entries)
            lines += [title, *(f"  {name.ljust(width)}  {line}" for name, line in entries.items())]
        return "\n".join(lines)

    emit(chosen, as_json, text)
