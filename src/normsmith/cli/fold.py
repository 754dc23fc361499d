"""`normsmith fold`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, OverwriteFlag, emit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def fold(
    model: Annotated[Path, typer.Argument(help="Folder of a tapered model, as `normsmith train` writes it.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any linear norm cannot be folded.")] = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Absorb every norm that is linear now into the layers that read it, verify, and write the smaller model.

    Example: normsmith fold runs/taper -o runs/folded
    """
    import dataclasses

    from normsmith.studies.checkpoint import check_output, load_checkpoint, save_checkpoint
    from normsmith.surgery import fold_

    check_output(model, output, overwrite)
    loaded = load_checkpoint(model)
    report = fold_(loaded, strict=strict)
    save_checkpoint(loaded, model, output, overwrite)
    emit({"output": str(output), **dataclasses.asdict(report)}, as_json, lambda: f"{report}\nwritten to {output}")
