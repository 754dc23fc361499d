"""`normsmith compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from normsmith.cli.common import DifferenceOption, JsonFlag, MetricOption, emit
from normsmith.cli.engines import AddressOption, EngineOption, GpusOption

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def compare(
    recipe: Annotated[Path, typer.Argument(help="Recipe file, or a name from `normsmith ls recipes`.")],
    arms: Annotated[
        list[str],
        typer.Option("--arms", help="Arms with commas between them (repeatable); the first is the reference."),
    ],
    seeds: Annotated[str, typer.Option("--seeds", help="How many, from the recipe's on; or the seeds: 3,5,8.")] = "5",
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", help="a.b=value,value: run every arm with each (repeatable: every combination)."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at once, each with its share of the cores.")] = 1,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Study folder [runs/NAME-study].")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change one key for all arms: a.b=value (repeatable).")
    ] = None,
    metric: MetricOption = None,
    difference: DifferenceOption = 0.01,
    retry: Annotated[
        bool, typer.Option("--retry", help="Try runs again that failed (not those that diverged).")
    ] = False,
    engine: EngineOption = "local",
    address: AddressOption = None,
    gpus: GpusOption = 0.0,
    as_json: JsonFlag = False,
) -> None:
    """Train several arms with the same seeds, batches and budget, and say what is better, by how much, how surely.

    An arm is `base` (the recipe as it is), `no-schedule` (without its schedule) or parts joined by `+`: the name of a
    norm, a connection or a schedule, with options as NAME:key=value,key=value, or set:a.b=value for any other setting.
    What a part does not name stays as in the recipe. A comma before key=value belongs to the arm, any other comma
    begins the next one:

        --arms rmsnorm,sphere:p=1,decay=none,taper:scale_loss=0,set:training.learning_rate=2e-3+dyt

    What decides is the task's metric where the data have one (accuracy, rmse), else the loss; --metric loss takes the
    loss. --difference is in its unit: nats per token for the loss of text, a share of 1 for an accuracy.

    With --sweep each arm is shown at its best point: chosen on validation, reported on test.

    The study can be interrupted at any point and continued by the same command; more arms and seeds can be added, and
    several processes can work on it. Runs that diverge or fail are kept and counted. OUTPUT gets a folder per run, and
    results.md, results.csv and results.json.

    Example: normsmith compare baseline-1m --arms rmsnorm,taper,sphere:p=1 --seeds 5 --jobs 2
    """
    import normsmith
    from normsmith.data import load_data
    from normsmith.folders import check_folder
    from normsmith.studies.arms import split_arms
    from normsmith.studies.budget import check_study_memory
    from normsmith.studies.comparison import read_comparison
    from normsmith.studies.corrupted import check_source
    from normsmith.studies.execute import StudyProgress, forget_failures
    from normsmith.studies.executors import make_executor
    from normsmith.studies.library import find_recipe
    from normsmith.studies.study import Plan, make_study, plan_study, read_seeds, read_sweep
    from normsmith.studies.tables import terminal, write_tables
    from normsmith.studies.tasks import check_data, check_metric
    from normsmith.training import Reporter

    loaded = find_recipe(recipe, changes or [])
    folder = output or Path("runs") / f"{loaded.name}-study"
    named, numbers, swept = split_arms(arms), read_seeds(seeds, loaded.seed), read_sweep(sweep or [])
    check_folder(folder, overwrite=False, resume=True)
    shared = plan_study(loaded, named, numbers, swept)
    check_metric(shared, metric)
    check_source(shared)
    if engine == "local":  # a cluster's machines have memories of their own
        check_study_memory(shared, named, swept)
    with Reporter(quiet=as_json) as reporter:
        data = load_data(shared.data, reporter.say)
        check_data(shared, data)
        plan = Plan(
            normsmith=normsmith.__version__,
            command=shlex.join(["normsmith", *sys.argv[1:]]),
            data_sha256=data.data_hash,
            base=shared,
            arms=tuple(named),
            seeds=numbers,
            sweep=swept,
        )
        study = make_study(folder, plan)
        if retry:
            forget_failures(study)
        executor = make_executor(engine, jobs, address, gpus)
        executor.run(study, data, StudyProgress(reporter, study))
    comparison = read_comparison(folder, difference, metric)
    write_tables(comparison, folder)
    options = ["-o", str(folder / "report.html"), *(["--metric", metric] if metric else [])]
    report = shlex.join(["normsmith", "report", str(folder), *options])
    ending = f"Table: {folder / 'results.md'}\nReport: {report}"
    emit(comparison.plain(), as_json, lambda: f"\n{terminal(comparison)}\n\n{ending}")
