"""`normsmith swap`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, OverwriteFlag, emit
from normsmith.cli.models import TrustFlag, WhereOption

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def swap(
    model: Annotated[Path, typer.Argument(help="Folder of any Hugging Face model.")],
    norm: Annotated[str, typer.Argument(help="The new norm, as NAME or NAME:key=value,… (see `normsmith ls norms`).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    where: WhereOption = None,
    init: Annotated[str, typer.Option("--init", help="`match` the trained norms, or start `fresh`.")] = "match",
    trust_remote_code: TrustFlag = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Replace a model's norms by another kind, starting from the trained ones, and write the model.

    Example: normsmith swap gpt2 dyt -o gpt2-dyt --where pre
    """
    import dataclasses

    from normsmith.cli.models import load_any, write_model
    from normsmith.folders import check_output
    from normsmith.surgery import swap_norms_
    from normsmith.surgery.export import export_model

    check_output(model, output, overwrite)
    loaded = load_any(model, trust_remote_code)
    report = swap_norms_(loaded, norm, where=where, init=init)  # pyright: ignore[reportArgumentType]
    said = write_model(model, output, overwrite, lambda folder: export_model(loaded, folder))
    emit(
        {"output": str(output), **dataclasses.asdict(report)},
        as_json,
        lambda: f"{report}\n{output}: {said}",
    )
