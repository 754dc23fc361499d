"""`normsmith validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, emit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def validate(
    recipe: Annotated[Path, typer.Argument(help="Recipe file or the name of a built-in one.")],
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change one key: a.b=value (repeatable).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a recipe and print it complete, with every default filled in; nothing is read or trained.

    Example: normsmith validate taper-1m --set training.batch_size=32
    """
    from normsmith.studies.library import find_recipe
    from normsmith.studies.runner import build_scheduled
    from normsmith.studies.tasks import known_facts

    loaded = find_recipe(recipe, changes or [])
    parameters = build_scheduled(loaded, known_facts(loaded))[0].num_parameters()
    examples = loaded.training.sequences
    text = loaded.data.kind == "text"
    unit, number = ("tokens", examples * loaded.text.sequence_length) if text else ("examples", examples)
    facts = {"parameters": parameters, unit: number}
    emit(
        {"recipe": loaded.to_dict(), **facts},
        as_json,
        lambda: f"{loaded.to_yaml()}# valid: {parameters:,} parameters, {number:,} training {unit} per process",
    )
