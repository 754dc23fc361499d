"""A study on disk: arms × sweep points × seeds, one folder per run.

- `STUDY/study.json`: what the study is.
- `STUDY/ARM/SEED/`: one run (recipe, environment, metrics, checkpoints, model, `result.json`); with a sweep
  `STUDY/ARM/KEY=VALUE/SEED/`.
- `STUDY/ARM/SEED/failure.json`: instead of `result.json`, where the run diverged or failed.
- `STUDY/ARM/.SEED.lock`: the process that has the run now.
- `STUDY/results.md`, `.csv`, `.json`: made from the run folders alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pydantic

import normsmith
from normsmith.config import Config, read_mapping
from normsmith.errors import ConfigError, InputError
from normsmith.folders import prepare_folder
from normsmith.report.results import write_text
from normsmith.studies.arms import arm_recipe, check_arms, check_setting, set_values
from normsmith.studies.files import CHECKED, PLAN
from normsmith.studies.locks import Lock, guard
from normsmith.studies.recipe import Recipe

FORMAT = 1
_OURS = {".normsmith", ".guard", PLAN, CHECKED}
_LONGEST = 80  # characters of a folder's name


class Plan(Config):
    """What a study is: `study.json`.

    Attributes:
        format: of the study's folders.
        normsmith: version that made it.
        command: what was typed; for the reader only.
        data_sha256: of the data that all runs read.
        base: the recipe that all arms share.
        arms: as written; the first is the reference, whose initial weights the others share.
        seeds: one run of every arm for each.
        sweep: setting → values, as text; every combination is run.
    """

    format: int = FORMAT
    normsmith: str
    command: str = ""
    data_sha256: str
    base: Recipe
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    sweep: dict[str, tuple[str, ...]] = pydantic.Field(default={})


@dataclass(frozen=True)
class Cell:
    """One run of a study; `start` is the recipe whose initial weights it shares."""

    arm: str
    point: str
    seed: int
    recipe: Recipe
    start: Recipe
    folder: Path

    @property
    def label(self) -> str:
        """What progress lines call it."""
        return ", ".join(part for part in (self.arm, self.point, f"seed {self.seed}") if part)

    @cached_property
    def recipe_text(self) -> str:
        """What its recipe.yaml holds."""
        return self.recipe.to_yaml()

    def fits(self, text: str) -> bool:
        """Whether a recipe.yaml is this run's."""
        return text == self.recipe_text or self.recipe.is_written_in(text)


class Study:
    """A study's folder and plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan

    @property
    def test_split(self) -> bool:
        """Whether the result is the loss on a test split, not that on the validation split."""
        return bool(self.plan.base.data.test_fraction)

    @cached_property
    def points(self) -> dict[str, dict[str, str]]:
        """Name of each sweep point → its settings; one point without a name where nothing is swept."""
        return sweep_points(self.plan.sweep)

    @cached_property
    def cells(self) -> list[Cell]:
        """All runs, seed by seed, so that complete pairs come early."""
        plan, names = self.plan, _folder_names(self.plan.arms)
        recipes = {arm: arm_recipe(plan.base, arm) for arm in plan.arms}
        found: list[Cell] = []
        for seed, (point, settings), arm in itertools.product(plan.seeds, self.points.items(), plan.arms):
            recipe, start = (
                set_values(recipes[name], settings).changed(seed=seed, name=name) for name in (arm, plan.arms[0])
            )
            folder = self.folder / names[arm] / (_folder_name(point) if point else "") / str(seed)
            found.append(Cell(arm, point, seed, recipe, start, folder))
        return found

    def lock(self, cell: Cell) -> Lock:
        """The lock of one run; it lies beside the run's folder, which is then empty until the run begins."""
        return Lock(self.folder, cell.folder.with_name(f".{cell.seed}.lock"))


def sweep_points(sweep: dict[str, tuple[str, ...]]) -> dict[str, dict[str, str]]:
    """Name of each combination of swept values → its settings; one without a name where nothing is swept."""
    chosen = itertools.product(*([(key, value) for value in values] for key, values in sweep.items()))
    return {",".join(f"{key}={value}" for key, value in pairs): dict(pairs) for pairs in chosen}


def _folder_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._=+-]", "_", text)
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _folder_names(arms: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for arm in arms:
        name = _folder_name(arm)
        names[arm] = name if name not in names.values() else f"{name}-{hashlib.sha256(arm.encode()).hexdigest()[:8]}"
    return names


def read_seeds(text: str, first: int) -> tuple[int, ...]:
    """Seeds as written: a number of them, from `first` on, or the seeds themselves with commas.

    Raises:
        InputError: no numbers, none at all, a negative one, or one twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise InputError(f"--seeds {text!r}: write a number of seeds, as 5, or the seeds themselves, as 3,5,8")
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        if not numbers[0]:
            raise InputError("--seeds 0: at least one seed is needed")
        return tuple(range(first, first + numbers[0]))
    if repeated := sorted({n for n in numbers if numbers.count(n) > 1}):
        raise InputError(f"--seeds {text!r}: seed {repeated[0]} is there twice, which would count one run as two")
    return tuple(numbers)


def read_sweep(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Sweeps as written, `a.b=value,value`, each a dimension.

    Raises:
        InputError: no setting or value, a setting or value twice, or one that all arms share.
    """
    sweep: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        listed = tuple(value.strip() for value in values.split(","))
        if not key or not equals or not all(listed):
            raise InputError(f"--sweep {text!r}: write for example training.learning_rate=1e-3,2e-3")
        if key in sweep or len(set(listed)) < len(listed):
            raise InputError(f"--sweep {text!r}: the setting or a value of it is there twice")
        check_setting(key)
        sweep[key] = listed
    return sweep


def plan_study(base: Recipe, arms: Sequence[str], seeds: Sequence[int], sweep: dict[str, tuple[str, ...]]) -> Recipe:
    """Check that the arms make a fair comparison, and return the recipe they share.

    Where something is chosen on the validation split, the best point of a sweep or the best step of a run, it has a
    test split (as large as the validation split, unless it has one already): what was chosen there is no honest result
    there.

    Raises:
        InputError: what `check_arms` refuses, or a swept setting that an arm names, or that a recipe has not.
    """
    if len(set(seeds)) < len(seeds) or not seeds:
        raise InputError(f"seeds {list(seeds)}: each must be there once, and one at least")
    recipes = check_arms(base, arms)
    for key, values in sweep.items():
        for arm, recipe in zip(arms, recipes, strict=True):
            if _look(recipe.to_dict(), key) != _look(base.to_dict(), key):
                raise InputError(f"arm {arm!r} changes {key}, which is swept; leave one of the two out")
            for value in values:
                set_values(recipe, {key: value})
    chosen = bool(sweep) or any(recipe.training.keep == "best" for recipe in recipes)
    if chosen and not base.data.test_fraction:
        return base.changed(data={**base.data.to_dict(), "test_fraction": base.data.validation_fraction})
    return base


def _look(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = cast("dict[str, Any]", settings).get(part) if isinstance(settings, dict) else None
    return settings


def make_study(folder: Path, plan: Plan) -> Study:
    """Begin the study in `folder`, or continue the one that is there.

    Arms and seeds may be added to a study; anything else must be what it was.

    Raises:
        InputError: the folder cannot be written, or holds something else, or another study.
    """
    prepare_folder(folder, overwrite=False, resume=True)
    with guard(folder):
        if (folder / PLAN).exists():
            _check_same(folder, load_study(folder).plan, plan)
        elif foreign := sorted(path.name for path in folder.iterdir() if path.name not in _OURS):
            raise InputError(f"{folder}: holds {foreign[0]} and no study; choose another folder")
        write_text(folder / PLAN, json.dumps(plan.to_dict(), indent=1) + "\n")
    return Study(folder, plan)


def _check_same(folder: Path, old: Plan, new: Plan) -> None:
    def refuse(what: str, remedy: str) -> None:
        raise InputError(f"{folder}: holds a study with {what}; {remedy}, or choose another folder")

    if old.normsmith != new.normsmith:
        refuse(f"runs of normsmith {old.normsmith}, this is {new.normsmith}", "finish it with that version")
    if old.base != new.base:
        theirs, ours = old.base.to_dict(), new.base.to_dict()
        keys = [f"{a}.{b}" for a, part in theirs.items() if isinstance(part, dict) for b in cast("Any", part)]
        changed = next((k for k in [*keys, *theirs] if _look(theirs, k) != _look(ours, k)), "another part")
        refuse(f"another recipe ({changed} was {_look(theirs, changed)!r})", "give the same recipe and --set")
    if old.data_sha256 != new.data_sha256:
        refuse(f"other data of {new.base.data.source}", "bring the old data back")
    if old.sweep != new.sweep:
        refuse(f"the sweep {old.sweep or 'none'}", "sweep the same")
    if old.arms[0] != new.arms[0] or not set(old.arms) <= set(new.arms):
        refuse(f"the arms {', '.join(old.arms)}", "name these too, the first one first")
    if not set(old.seeds) <= set(new.seeds):
        refuse(f"the seeds {', '.join(map(str, old.seeds))}", "name these too")


def load_study(folder: Path) -> Study:
    """The study in `folder`.

    Raises:
        InputError: no such folder, no study in it, one of another format, or one whose plan was damaged.
    """
    path = folder / PLAN
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    if not path.exists():
        raise InputError(f"{folder}: holds no study ({PLAN} is missing)")
    mapping = read_mapping(path)
    if mapping.get("format") != FORMAT:
        raise InputError(
            f"{path}: has the format {mapping.get('format')!r}, this version of normsmith "
            f"({normsmith.__version__}) reads {FORMAT}"
        )
    try:
        study = Study(folder, Plan(**mapping))
        if len(set(study.plan.seeds)) < len(study.plan.seeds) or len(set(study.plan.arms)) < len(study.plan.arms):
            raise ConfigError("a seed or an arm is there twice")
        if not study.cells or (study.plan.sweep and not study.plan.base.data.test_fraction):
            raise ConfigError("it has no runs, or a sweep without a test split")
    except (InputError, TypeError) as error:
        raise InputError(f"{path}: is not a study as normsmith writes it: {error}") from None
    return study
