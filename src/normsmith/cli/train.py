"""`normsmith train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, OverwriteFlag, emit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="Recipe file, or a name from `normsmith ls recipes`.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write to [runs/NAME].")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change one key: a.b=value (repeatable).")] = None,
    start: Annotated[
        Path | None, typer.Option("--start", help="Recipe whose initial weights it shares, as an arm of a study does.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in OUTPUT.")] = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train what a recipe says; OUTPUT then loads with transformers.

    Example: normsmith train taper-1m --set training.max_steps=200 -o runs/taper
    """
    from normsmith.studies import check_folder, run_recipe
    from normsmith.studies.library import find_recipe
    from normsmith.studies.tasks import task_of
    from normsmith.training import Reporter

    loaded = find_recipe(recipe, changes or [])
    shared = None if start is None else find_recipe(start)
    folder = output or Path("runs") / loaded.name
    check_folder(folder, overwrite, resume)
    with Reporter(quiet=as_json) as reporter:
        run = run_recipe(loaded, folder, reporter, overwrite=overwrite, resume=resume, start=shared)
    result = {"output": str(folder), "validation_loss": run.validation_loss, "seconds": run.seconds}
    said = f"validation loss {run.validation_loss:.4f}"
    if metric := task_of(loaded).metric:
        result |= {"metric": metric.name, "validation_metric": run.validation_metric, "test_metric": run.test_metric}
        said += f", {metric.name} {run.validation_metric:.4f} (test {run.test_metric:.4f})"
    emit(result, as_json, lambda: f"{said} after {run.seconds:.0f} s: {folder}")
