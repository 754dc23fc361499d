"""The papers' tables as studies: `reproduce/PAPER-SCALE.yaml`, each a few comparisons and what was published."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from pydantic import Field

import normsmith
from normsmith.bench import LABELS, bench_decode, decode_family
from normsmith.config import Config, apply_overrides, read_mapping
from normsmith.data import load_data
from normsmith.errors import InputError, UnknownNameError
from normsmith.folders import prepare_folder
from normsmith.report.attached import Published
from normsmith.report.results import write_text
from normsmith.studies.arms import arm_recipe
from normsmith.studies.budget import Budget, Machine, budget, check_study_memory
from normsmith.studies.cells import read_cell
from normsmith.studies.checkpoint import load_checkpoint
from normsmith.studies.corrupted import check_source
from normsmith.studies.execute import Executor, StudyProgress
from normsmith.studies.files import DECODE, PUBLISHED
from normsmith.studies.recipe import Recipe
from normsmith.studies.study import Plan, Study, make_study, plan_study, read_sweep
from normsmith.studies.tasks import check_data
from normsmith.training import Reporter

_ROUNDS = 9  # of the decoding benchmark
SCALES = ("smoke", "local", "small", "paper")
_FOLDER = Path(str(resources.files("normsmith.studies") / "reproduce"))


class Download(Config):
    """A data set that has to be fetched: its name on the Hub and about how large it is."""

    name: str = Field(min_length=1)
    gigabytes: float = Field(gt=0)


class StudyPlan(Config):
    """One comparison of a reproduction.

    Attributes:
        about: what it shows, in a sentence.
        recipe: shared by all arms.
        arms: as in `normsmith compare`; the first is the reference.
        seeds: how many, from the recipe's on.
        sweep: setting → values.
        published: figures of the paper, shown beside ours.
        processes: that share one run (torchrun).
        download: what has to be fetched first.
        decode: arm whose first finished model is measured: decoding with norms, tapered, folded, norm-free.
    """

    about: str = Field(min_length=1)
    recipe: Recipe
    arms: tuple[str, ...] = Field(min_length=2)
    seeds: int = Field(default=3, ge=1)
    sweep: dict[str, tuple[str | float, ...]] = pydantic.Field(default={})
    published: tuple[Published, ...] = ()
    processes: int = Field(default=1, ge=1)
    download: Download | None = None
    decode: str | None = None

    def check(self) -> None:
        """The arm that is measured must be one of the arms."""
        if self.decode is not None and self.decode not in self.arms:
            raise ValueError(f"decode names {self.decode!r}, which is not among the arms")

    @property
    def own_files(self) -> str | None:
        """The source, where it is neither built in nor fetched: then it is the user's own."""
        data = self.recipe.data
        built_in = type(data).model_fields["source"].default
        return None if self.download is not None or data.source == built_in else data.source

    @property
    def swept(self) -> dict[str, tuple[str, ...]]:
        """The sweep with values as text, checked."""
        return read_sweep([f"{key}={','.join(map(str, values))}" for key, values in self.sweep.items()])

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The seeds themselves."""
        return tuple(range(self.recipe.seed, self.recipe.seed + self.seeds))

    @property
    def runs(self) -> int:
        """How many runs it is."""
        points = 1
        for values in self.sweep.values():
            points *= len(values)
        return len(self.arms) * self.seeds * points


class Reproduction(Config):
    """A paper at one scale. `source` names the paper; `studies` maps a folder's name to a comparison."""

    paper: str
    scale: Literal["smoke", "local", "small", "paper"]
    title: str
    source: str
    studies: dict[str, StudyPlan] = Field(min_length=1)


def papers() -> list[str]:
    """Names of the papers that can be reproduced."""
    return sorted({path.stem.rpartition("-")[0] for path in _FOLDER.glob("*-smoke.yaml")})


def find_reproduction(paper: str, scale: str, data: Path | None = None) -> Reproduction:
    """The built-in reproduction of a paper at a scale.

    Args:
        paper: one of `papers()`.
        scale: one of `SCALES`.
        data: the folder with the files that the scale `local` reads, whose plans name them relative to it.

    Raises:
        UnknownNameError: no such paper or scale.
        InputError: `local` without a folder, a folder without one of the files, or a folder for another scale.
    """
    if paper not in papers():
        raise UnknownNameError("paper", paper, papers())
    if scale not in SCALES:
        raise UnknownNameError("scale", scale, SCALES)
    mapping: dict[str, Any] = {"paper": paper, "scale": scale, **read_mapping(_FOLDER / f"{paper}-{scale}.yaml")}
    if scale == "local":
        _give_sources(mapping["studies"], data)
    elif data is not None:
        raise InputError(f"--data {data}: only --scale local reads files of a folder; the scale is {scale!r}")
    return Reproduction(**mapping)


def _give_sources(plans: dict[str, Any], folder: Path | None) -> None:
    sources = [plan["recipe"]["data"]["source"] for plan in plans.values()]
    if folder is None:
        raise InputError(f"--scale local needs --data DIR, a folder with {', '.join(sources)}")
    if missing := [source for source in sources if not (folder / source).exists()]:
        raise InputError(
            f"{folder}: no {' and no '.join(missing)} in it; --scale local reads {', '.join(sources)} from --data"
        )
    for plan in plans.values():
        plan["recipe"]["data"]["source"] = str(folder / plan["recipe"]["data"]["source"])


@dataclass(frozen=True)
class Cost:
    """The budget of one arm of one study, and how many runs it has."""

    study: str
    arm: str
    runs: int
    each: Budget
    processes: int
    download: Download | None


def costs(reproduction: Reproduction, machine: Machine | None = None) -> list[Cost]:
    """What every arm of every study would cost; every arm is known to build afterwards."""
    found: list[Cost] = []
    for name, plan in reproduction.studies.items():
        shared = plan_study(plan.recipe, plan.arms, plan.seed_numbers, plan.swept)
        for arm in plan.arms:
            each = budget(arm_recipe(shared, arm), plan.processes, machine)
            found.append(Cost(name, arm, plan.runs // len(plan.arms), each, plan.processes, plan.download))
    return found


def run_reproduction(
    reproduction: Reproduction,
    folder: Path,
    executor: Executor,
    reporter: Reporter,
    *,
    command: str,
) -> list[Study]:
    """Carry out all studies of a reproduction, each in a folder of its name; finished runs are skipped.

    Args:
        reproduction: what is run.
        folder: where the studies' folders are made.
        executor: who carries the runs out.
        reporter: shows progress.
        command: that repeats it.

    Raises:
        InputError: a recipe that does not fit the machine's memory, data that are not there, or a folder that holds
            another study.
    """
    prepared: list[tuple[str, StudyPlan, Recipe]] = []
    for name, plan in reproduction.studies.items():
        shared = plan_study(plan.recipe, plan.arms, plan.seed_numbers, plan.swept)
        check_study_memory(shared, plan.arms, plan.swept)
        _check_source(name, shared)
        check_source(shared)
        if plan.processes > 1:
            raise InputError(
                f"the study {name!r} shares a run among {plan.processes} processes: write its recipes with "
                "--write-recipes and start each with torchrun"
            )
        prepared.append((name, plan, shared))
    prepare_folder(folder, overwrite=False, resume=True)
    done: list[Study] = []
    for name, plan, shared in prepared:
        reporter.say(f"{name}: {plan.about}")
        data = load_data(shared.data, reporter.say)
        check_data(shared, data)
        study = make_study(
            folder / name,
            Plan(
                normsmith=normsmith.__version__,
                command=command,
                data_sha256=data.data_hash,
                base=shared,
                arms=plan.arms,
                seeds=plan.seed_numbers,
                sweep=plan.swept,
            ),
        )
        if plan.published:
            figures: list[dict[str, Any]] = [p.to_dict() for p in plan.published]
            write_text(study.folder / PUBLISHED, json.dumps(figures, indent=1) + "\n")
        executor.run(study, data, StudyProgress(reporter, study))
        if plan.decode is not None:
            _measure_decoding(study, plan.decode, reporter)
        done.append(study)
    return done


def _check_source(name: str, recipe: Recipe) -> None:
    """Refuse a study of files that are not there, before the studies ahead of it have taken their days."""
    source, embedded = recipe.data.source, type(recipe.data).model_fields["source"].default
    if source == embedded or hasattr(recipe.data, "subset") or Path(source).expanduser().exists():
        return  # what has a `subset` may be a name on the Hub
    raise InputError(
        f"the study {name!r} reads {source!r}, and there is no such file or folder here; put your copy there, or a "
        "link to it, or choose other studies with --only"
    )


def _measure_decoding(study: Study, arm: str, reporter: Reporter) -> None:
    """Write the decoding speeds of the arm's first finished model beside the study, once."""
    finished = [cell for cell in study.cells if cell.arm == arm and read_cell(study, cell).state == "finished"]
    if not finished or (study.folder / DECODE).exists():
        return
    model = load_checkpoint(finished[0].folder)
    task = reporter.task(f"decoding, {arm}", _ROUNDS)
    prompt = torch.randint(model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
    speeds = bench_decode(decode_family(model, fused=True), prompt, rounds=_ROUNDS, tick=task.update)
    rows = [{**dataclasses.asdict(speed), "label": LABELS[speed.name]} for speed in speeds]
    write_text(study.folder / DECODE, json.dumps(rows, indent=1) + "\n")


def write_recipes(reproduction: Reproduction, folder: Path) -> list[Path]:
    """Write every run's recipe as a file, for `normsmith train` or torchrun; the paths."""
    written: list[Path] = []
    for name, plan in reproduction.studies.items():
        shared = plan_study(plan.recipe, plan.arms, plan.seed_numbers, plan.swept)
        study = Study(
            folder / name,
            Plan(
                normsmith=normsmith.__version__,
                data_sha256="",
                base=shared,
                arms=plan.arms,
                seeds=plan.seed_numbers,
                sweep=plan.swept,
            ),
        )
        for cell in study.cells:
            path = cell.folder.with_suffix(".yaml")
            written.append(write_text(path, cell.recipe.to_yaml()))
    return written


def changed_plan(
    reproduction: Reproduction, changes: list[str], seeds: int | None = None, only: Sequence[str] | None = None
) -> Reproduction:
    """The reproduction with settings of every recipe changed (`a.b=value`), another number of seeds, fewer studies.

    Raises:
        InputError: an unknown key, a wrong value, an unknown study.
    """
    if unknown := next((name for name in only or () if name not in reproduction.studies), None):
        raise UnknownNameError("study", unknown, reproduction.studies)
    plans: dict[str, Any] = {
        name: {
            **plan.to_dict(),
            "recipe": apply_overrides(plan.recipe.to_dict(), changes),
            "seeds": seeds or plan.seeds,
        }
        for name, plan in reproduction.studies.items()
        if only is None or name in only
    }
    mapping: dict[str, Any] = {**reproduction.to_dict(), "studies": plans}
    return Reproduction(**mapping)
