"""`normsmith reproduce`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normsmith.cli.common import JsonFlag, emit
from normsmith.cli.engines import AddressOption, EngineOption, GpusOption

if TYPE_CHECKING:
    from normsmith.studies.reproduction import Cost, Reproduction

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="autonorm, spheretnorm or tapernorm.")],
    scale: Annotated[str, typer.Option("--scale", help="smoke (no download), local, small, or paper.")] = "smoke",
    data: Annotated[Path | None, typer.Option("--data", help="Folder with the files that --scale local reads.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder [runs/PAPER-SCALE].")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only these studies of the plan (names with commas).")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", min=1, help="Instead of the number in the plan.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at once, each with its share of the cores.")] = 2,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change one key of every recipe: a.b=value (repeatable).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would cost; nothing is read or trained.")
    ] = False,
    recipes: Annotated[
        Path | None, typer.Option("--write-recipes", help="Only write every run's recipe into this folder.")
    ] = None,
    peak: Annotated[float, typer.Option("--peak", min=0.001, help="TFLOP/s of one accelerator, for --dry-run.")] = 312,
    utilisation: Annotated[
        float, typer.Option("--utilisation", min=0.001, max=1, help="Share of it that training reaches.")
    ] = 0.4,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Run a paper's tables as studies of paired seeds, and write a report with the published figures beside ours.

    Interrupted, the same command continues. docs/reproduce.md says for each paper what is public, what had to be
    chosen, and what was measured.

    Example: normsmith reproduce spheretnorm --scale smoke
    """
    from normsmith.folders import check_folder
    from normsmith.report.study_page import write_study_report
    from normsmith.studies.budget import Machine
    from normsmith.studies.executors import make_executor
    from normsmith.studies.reproduction import changed_plan, costs, find_reproduction, run_reproduction, write_recipes
    from normsmith.training import Reporter

    chosen = None if only is None else [name.strip() for text in only for name in text.split(",")]
    plan = changed_plan(find_reproduction(paper, scale, data), changes or [], seeds, chosen)
    if dry_run:
        machine = Machine(f"{peak:g} TFLOP/s, {utilisation:.0%} of it", peak * 1e12, utilisation)
        found = costs(plan, machine)
        rows = [
            {**dataclasses.asdict(c), "download": None if c.download is None else c.download.to_dict()} for c in found
        ]
        emit(rows, as_json, lambda: _budget(plan, found, machine.name))
        return
    if recipes is not None:
        written = write_recipes(plan, recipes)
        emit([str(path) for path in written], as_json, lambda: f"{len(written)} recipes: {recipes}")
        return
    folder = output or Path("runs") / f"{paper}-{scale}"
    check_folder(folder, overwrite=False, resume=True)
    command = shlex.join(["normsmith", *sys.argv[1:]])
    with Reporter(quiet=as_json) as reporter:
        executor = make_executor(engine, jobs, address, gpus)
        studies = run_reproduction(plan, folder, executor, reporter, command=command)
    page = folder / "report.html"
    accounts = write_study_report([study.folder for study in studies], page)
    write_study_report([study.folder for study in studies], folder / "results.md")
    result: dict[str, Any] = {"output": str(folder), "studies": [a.comparison.plain() for a in accounts]}
    emit(result, as_json, lambda: "\n".join([*(f"{a.name}: {a.summary}" for a in accounts), "", f"Report: {page}"]))


def _budget(plan: Reproduction, found: list[Cost], machine: str) -> str:
    from normsmith.report.table import duration
    from normsmith.surgery.table import text_table

    rows = [
        (
            c.study,
            c.arm,
            str(c.runs),
            f"{c.each.parameters / 1e6:,.2f}",
            f"{c.each.tokens / 1e6:,.1f}",
            f"{c.each.flops:.2e}",
            f"{c.each.memory / 1e9:.1f}",
            duration(3600 * c.each.hours),
        )
        for c in found
    ]
    heads = ("study", "arm", "runs", "M parameters", "M tokens", "FLOPs", "GB per process", "time")
    lines = [f"{plan.title} ({plan.source}), scale {plan.scale}", "", text_table(heads, rows), ""]
    hours = sum(c.runs * c.each.hours for c in found)
    runs = sum(c.runs for c in found)
    lines.append(
        f"{runs} runs, {duration(3600 * hours)} of accelerators in all ({machine}); the table says what one run costs"
    )
    downloads = {c.download.name: c.download.gigabytes for c in found if c.download is not None}
    lines += [f"to download: {name}, about {size:g} GB" for name, size in downloads.items()]
    own = {name: source for name, study in plan.studies.items() if (source := study.own_files)}
    lines += [f"{name} reads your files: {source}" for name, source in own.items()]
    shared = {c.study: c.processes for c in found if c.processes > 1}
    lines += [f"{study}: each run is shared by {n} processes (torchrun)" for study, n in shared.items()]
    return "\n".join(lines)
