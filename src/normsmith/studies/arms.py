"""Arms of a study as they are written on a command line, and the recipes they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from normsmith.config import Config, apply_overrides
from normsmith.connections import connection_config, connections
from normsmith.errors import InputError, NormsmithError, UnknownNameError
from normsmith.norms import Norm, norm_config, norms
from normsmith.registry import parse_spec
from normsmith.schedules import schedules
from normsmith.studies.recipe import Recipe
from normsmith.studies.runner import build_scheduled
from normsmith.studies.tasks import known_facts, model_config

# What would make the comparison unfair: all arms read the same batches and have the same budget.
_SHARED = ("name", "seed", "data", "evaluation")
_BUDGET = ("max_steps", "batch_size", "gradient_accumulation")


def split_arms(texts: Sequence[str]) -> list[str]:
    """The arms in `texts`, each with commas between arms and between the options of one arm.

    >>> split_arms(["rmsnorm,sphere:p=1,decay=none,taper"])
    ['rmsnorm', 'sphere:p=1,decay=none', 'taper']
    """
    arms: list[str] = []
    for text in texts:
        continues = False
        for piece in text.split(","):
            option = "=" in piece and ":" not in piece.split("=")[0]
            if option and continues:
                arms[-1] += f",{piece}"
            else:
                arms.append(piece.strip())
            continues = True
    return arms


def arm_recipe(base: Recipe, arm: str) -> Recipe:
    """The recipe of one arm: `base` with what `arm` names, and nothing else, changed.

    Options are merged into a part of the same kind: `taper:scale_loss=0` keeps the other settings of the base's taper.

    Raises:
        InputError: an unknown name or option (with the nearest one), a wrong value, or a setting that all arms share.
    """
    if not arm:
        raise InputError("an arm is empty; write for example --arms rmsnorm,layernorm")
    recipe = base
    try:
        for part in re.split(r"\+(?=[A-Za-z_])", arm):
            recipe = _changed(recipe, part)
    except NormsmithError as error:
        raise InputError(f"arm {arm!r}: {error}") from None
    return recipe


def _changed(recipe: Recipe, part: str) -> Recipe:
    name = part.partition(":")[0]
    if part == "base":
        return recipe
    if part == "no-schedule":
        return recipe.changed(schedule=None)
    if name == "set":
        return _set(recipe, part)
    preset = model_config(recipe, known_facts(recipe)).norm_spec
    kinds: list[tuple[str, Any, Any, Callable[..., Any]]] = [
        ("norm", norms, recipe.norm or preset, norm_config),
        ("connection", connections, recipe.connection, connection_config),
        ("schedule", schedules, recipe.schedule, schedules.config),
    ]
    for key, registry, now, config in kinds:
        if name in registry:
            return recipe.changed(**{key: _merged(registry.aliases.get(name, {}), part, now, config)})
    known = [n for _, registry, _, _ in kinds for n in (*registry, *registry.aliases)]
    raise UnknownNameError("name", name, [*known, "base", "no-schedule", "set"])


def _merged(alias: dict[str, Any], part: str, now: Config | None, config: Callable[..., Any]) -> dict[str, Any]:
    spec = parse_spec(part)
    options = dict(spec) if isinstance(spec, dict) else {"kind": spec}
    kind = alias.get("kind", options["kind"])
    named = {**alias, **options, "kind": kind}
    kept = now.to_dict() if now is not None and getattr(now, "kind", None) == kind else {}
    return config({**kept, **named}).to_dict()


def _set(recipe: Recipe, part: str) -> Recipe:
    options = parse_spec(part)
    if isinstance(options, str):
        raise InputError("set needs a setting: write set:training.learning_rate=2e-3")
    settings = {key: value for key, value in options.items() if key != "kind"}
    for key in settings:
        check_setting(key)
    return set_values(recipe, settings)


def check_setting(key: str) -> None:
    """Refuse a setting that must be the same in all arms, or the comparison would not be one."""
    first, _, rest = key.partition(".")
    if first in _SHARED or (first == "training" and rest in (*_BUDGET, "")):
        raise InputError(
            f"{key} is shared by all arms (same data, batches and budget); change it for the whole study with --set"
        )


def set_values(recipe: Recipe, settings: dict[str, str]) -> Recipe:
    """The recipe with dotted settings changed; values are read as YAML."""
    return Recipe(**apply_overrides(recipe.to_dict(), [f"{key}={value}" for key, value in settings.items()]))


def check_arms(base: Recipe, arms: Sequence[str]) -> list[Recipe]:
    """The recipes of all arms, each known to build.

    Raises:
        InputError: no arms or one only, an arm named twice, two arms that are the same model and training, or one that
            cannot be built.
    """
    if len(arms) < 2:
        raise InputError("a comparison needs at least two arms; write for example --arms rmsnorm,layernorm")
    recipes: list[Recipe] = []
    seen: dict[str, str] = {}
    for arm in arms:
        recipe = arm_recipe(base, arm)
        try:
            key = _what_runs(recipe)
        except NormsmithError as error:
            raise InputError(f"arm {arm!r}: {error}") from None
        if key in seen:
            raise InputError(
                f"the arms {seen[key]!r} and {arm!r} are the same model and training, so there is nothing to compare; "
                "leave one out, or change what it names"
            )
        seen[key] = arm
        recipes.append(recipe)
    return recipes


def _what_runs(recipe: Recipe) -> str:
    """Everything that decides a run, as one comparable text; a norm counts where the model has one, not where it is
    named: a sphere has no internal norms to differ in.
    """
    with torch.device("meta"):  # nothing of its values counts, and a large one would fill the memory
        model, _ = build_scheduled(recipe, known_facts(recipe))
    found = [(name, m.config.to_dict()) for name, m in model.named_modules() if isinstance(m, Norm)]
    settings = {key: value for key, value in recipe.to_dict().items() if key not in ("norm", "name")}
    return json.dumps([settings, found], sort_keys=True)
