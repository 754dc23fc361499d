"""`normsmith fold`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, OverwriteFlag, emit
from normsmith.cli.models import WhereOption

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def fold(
    model: Annotated[
        Path,
        typer.Argument(help="Folder of a tapered model, as `normsmith train` writes it, or any Hugging Face model."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    where: WhereOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any norm that could go cannot be folded.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python files that come with the checkpoint.")
    ] = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Absorb a tapered model's norms, or any model's gains and shifts, into the layers that read them.

    Every norm of a tapered model that is linear now is removed, and the result verified. Of any other model the norms
    stay, without gain and shift; its files are folded piece by piece, so that they may be larger than the memory.

    Example: normsmith fold runs/taper -o runs/folded
    """
    import dataclasses

    from normsmith.folders import check_output
    from normsmith.studies.checkpoint import is_own, load_checkpoint, save_checkpoint
    from normsmith.surgery import fold_, fold_checkpoint
    from normsmith.training import Reporter

    check_output(model, output, overwrite)
    if is_own(model):
        loaded = load_checkpoint(model)
        report = fold_(loaded, where=where, strict=strict)
        save_checkpoint(loaded, model, output, overwrite)
    else:
        with Reporter(quiet=as_json) as reporter:
            task = reporter.task("folding, %", 100)
            report = fold_checkpoint(
                model,
                output,
                where=where,
                overwrite=overwrite,
                trust_remote_code=trust_remote_code,
                strict=strict,
                tick=lambda done, total: task.update(100 * done // total),
            )
    emit({"output": str(output), **dataclasses.asdict(report)}, as_json, lambda: f"{report}\nwritten to {output}")
