"""The built-in recipes, and everything else that has a name."""

from __future__ import annotations

import inspect
from importlib import resources
from pathlib import Path

from normsmith.connections import connections
from normsmith.errors import UnknownNameError
from normsmith.evaluation import suites
from normsmith.models import PRESETS
from normsmith.norms import norms
from normsmith.schedules import schedules
from normsmith.studies.recipe import Recipe, load_recipe

_FOLDER = Path(str(resources.files("normsmith.studies") / "recipes"))


def recipe_names() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def find_recipe(recipe: str | Path, overrides: list[str] | None = None) -> Recipe:
    """A recipe from a file, or the built-in one of that name.

    Raises:
        InputError: neither a file nor a built-in name, or the recipe does not validate.
    """
    path = Path(recipe)
    if path.suffix in {".yaml", ".yml", ".json"} or path.is_file() or len(path.parts) > 1:
        return load_recipe(path, overrides)
    if path.name not in recipe_names():
        raise UnknownNameError("recipe", path.name, recipe_names())
    return load_recipe(_FOLDER / f"{path.name}.yaml", overrides)


def listing() -> dict[str, dict[str, str]]:
    """Kind of thing → name → one line about it, straight from the registries."""

    def first(documented: object) -> str:
        return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())

    def heading(recipe: str) -> str:
        return (_FOLDER / f"{recipe}.yaml").read_text("utf-8").split("\n")[0].lstrip("# ")

    sphere = {alias: "sphere with " + _options(options) for alias, options in connections.aliases.items()}
    return {
        "norms": {name: first(norms.get(name)) for name in norms},
        "connections": {name: first(connections.get(name)) for name in connections} | sphere,
        "schedules": {name: first(schedules.get(name)) for name in schedules},
        "presets": {name: _options(options) for name, options in PRESETS.items()},
        "recipes": {name: heading(name) for name in recipe_names()},
        "suites": {name: first(suites.get(name)) for name in suites},
    }


def _options(options: dict[str, object]) -> str:
    def text(value: object) -> str:
        return str(value["kind"]) if isinstance(value, dict) else str(value)

    return ", ".join(f"{key}={text(value)}" for key, value in options.items() if key != "kind")
