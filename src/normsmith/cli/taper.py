"""`normsmith taper`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from normsmith.cli.common import JsonFlag, OverwriteFlag, emit
from normsmith.cli.models import TrustFlag

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def taper(
    model: Annotated[Path, typer.Argument(help="Folder of a pretrained causal language model with its tokenizer.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    data: Annotated[str, typer.Option("--data", help="Text file, folder, Hub data set or `stdlib`.")],
    steps: Annotated[int | None, typer.Option("--steps", min=2, help="Optimiser steps [by the model's size].")] = None,
    method: Annotated[
        str, typer.Option("--method", help="`taper`, or `fakeln`: norms become constants one by one.")
    ] = "taper",
    placement: Annotated[
        str, typer.Option("--placement", help="`internal`, `all` or, with taper, `final` norms.")
    ] = "internal",
    order: Annotated[
        str, typer.Option("--order", help="`together`, or `audit`: one by one, easiest first.")
    ] = "together",
    control: Annotated[
        bool,
        typer.Option(
            "--control/--no-control", help="Fine-tune the unchanged model too; it is the teacher and the comparison."
        ),
    ] = True,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change one key, as training.learning_rate=1e-4 (repeatable).")
    ] = None,
    trust_remote_code: TrustFlag = False,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove a pretrained model's norms: fine-tune while they taper, fold, verify, evaluate, measure decoding.

    OUTPUT receives the model (loads with transformers alone), a model card with the numbers, and report.html.
    Keys for --set: training.*, taper.*, sequential.* (of fakeln), data.*, distill (0 to 1: how much of the training
    loss while norms go is the divergence from the control), taper_learning_rate (then; by default higher than the
    control's, because there a teacher keeps the model from overfitting), windows, decode_rounds, seed. A
    training.learning_rate that you set counts for both.

    Example: normsmith taper gpt2 --data novel.txt --steps 300 -o gpt2-norm-free
    """
    from normsmith.cli.models import load_any
    from normsmith.config import apply_overrides
    from normsmith.errors import UnknownNameError
    from normsmith.folders import check_output
    from normsmith.report import markdown_table
    from normsmith.studies.removal import METHODS, RemovalConfig, preset, remove_norms
    from normsmith.training import Reporter

    check_output(model, output, overwrite)
    loaded = load_any(model, trust_remote_code)
    if method not in METHODS:
        raise UnknownNameError("method", method, METHODS)
    settings: dict[str, Any] = preset(loaded, steps, method).to_dict()
    settings["data"] |= {"source": data}
    settings["sequential" if method == "fakeln" else "taper"] |= {"placement": placement}
    settings |= {"order": order, "control": control}
    named = [change.partition("=")[0].strip() for change in changes or []]
    if "training.learning_rate" in named and "taper_learning_rate" not in named:
        settings["taper_learning_rate"] = None
    config = RemovalConfig(**apply_overrides(settings, changes or []))
    command = shlex.join(["normsmith", *sys.argv[1:]])
    with Reporter(quiet=as_json) as reporter:
        removal = remove_norms(loaded, model, output, config, reporter, command=command, overwrite=overwrite)
    results = removal.results
    emit(
        {"output": str(output), **results.plain()},
        as_json,
        lambda: f"\n{markdown_table(results)}\n\n{removal.report}\n\n{results.summary}\n\nwritten to {output}",
    )
