"""`normsmith demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import JsonFlag, OverwriteFlag, emit

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and fewer steps: under a minute.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of weights and data order.")] = 0,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train three arms on the standard library's sources, fold the tapered one, and write a report.

    The arms are an RMSNorm baseline, internal taper with scale loss, and the sphere with p = 1: same seed, same data,
    same budget. About four minutes on two cores; the report is OUTPUT/report.html.

    Example: normsmith demo --quick -o runs/quick
    """
    from normsmith.report import markdown_table
    from normsmith.studies import check_folder
    from normsmith.studies.demo import run_demo
    from normsmith.training import Reporter

    check_folder(output, overwrite)
    command = " ".join(["normsmith", *sys.argv[1:]])
    with Reporter(quiet=as_json) as reporter:
        results = run_demo(output, reporter, quick=quick, command=command, seed=seed, overwrite=overwrite)

    def text() -> str:
        speeds = "\n".join(f"  {row.label:32} {row.median:7.0f} tokens/s   {row.ratio:.2f}×" for row in results.decode)
        return (
            f"\n{markdown_table(results)}\n\nDecoding with a KV cache\n{speeds}\n\n{results.summary}\n\n"
            f"Report: {output / 'report.html'}\nFolded model: {output / 'folded'}"
        )

    emit(results.plain(), as_json, text)
