"""`normsmith convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, OverwriteFlag, emit
from normsmith.cli.models import TrustFlag

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def convert(
    model: Annotated[Path, typer.Argument(help="Folder of a model, changed by normsmith or not.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    to: Annotated[str, typer.Option("--to", help="`native`, `stock` or `onnx`.")] = "native",
    trust_remote_code: TrustFlag = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a model in another format: with its own modelling file, as its stock class, or as ONNX.

    Example: normsmith convert gpt2-tapered -o gpt2-onnx --to onnx --trust-remote-code
    """
    from normsmith.cli.models import load_any, write_model
    from normsmith.folders import check_output
    from normsmith.surgery.export import export_model

    check_output(model, output, overwrite)
    loaded = load_any(model, trust_remote_code)
    said = write_model(model, output, overwrite, lambda folder: export_model(loaded, folder, to))  # pyright: ignore[reportArgumentType]
    emit({"output": str(output), "format": to, "note": said}, as_json, lambda: f"{output}: {said}")
