"""`normsmith train`."""

from __future__ import annotations

import warnings
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

    Several GPUs: torchrun --standalone --nproc-per-node 8 -m normsmith train RECIPE

    Example: normsmith train taper-1m --set training.max_steps=200 -o runs/taper
    """
    from normsmith import ranks
    from normsmith.studies import check_folder, run_recipe
    from normsmith.studies.budget import check_memory
    from normsmith.studies.library import find_recipe
    from normsmith.studies.tasks import task_of
    from normsmith.training import Reporter

    if ranks.world_size() > 1:
        # Of torch, to transformers, whose Trainer passes the old name of an option of ours.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    loaded, shared = ranks.together(
        lambda: (find_recipe(recipe, changes or []), None if start is None else find_recipe(start))
    )
    ranks.together(lambda: check_memory(loaded))
    folder = output or Path("runs") / loaded.name
    # Looked at before another process of the run could write to it.
    ranks.on_first(lambda: check_folder(folder, overwrite, resume))
    with Reporter(quiet=as_json or ranks.rank() > 0) as reporter:
        run = run_recipe(loaded, folder, reporter, overwrite=overwrite, resume=resume, start=shared)
    ranks.leave()
    if ranks.rank() > 0:
        return
    result = {"output": str(folder), "validation_loss": run.validation_loss, "seconds": run.seconds}
    said = f"validation loss {run.validation_loss:.4f}"
    if metric := task_of(loaded).metric:
        result |= {"metric": metric.name, "validation_metric": run.validation_metric, "test_metric": run.test_metric}
        said += f", {metric.name} {run.validation_metric:.4f} (test {run.test_metric:.4f})"
    emit(result, as_json, lambda: f"{said} after {run.seconds:.0f} s: {folder}")
