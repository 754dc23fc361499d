"""Recipes, and what carries them out.

Names load on first use: reading what runs left behind needs no model, so it must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normsmith.folders import check_folder, prepare_folder, write_folder
    from normsmith.studies.recipe import EvaluationConfig, Recipe, load_recipe
    from normsmith.studies.runner import Run, run_recipe

_HOME = {
    "EvaluationConfig": "normsmith.studies.recipe",
    "Recipe": "normsmith.studies.recipe",
    "Run": "normsmith.studies.runner",
    "check_folder": "normsmith.folders",
    "load_recipe": "normsmith.studies.recipe",
    "prepare_folder": "normsmith.folders",
    "run_recipe": "normsmith.studies.runner",
    "write_folder": "normsmith.folders",
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "EvaluationConfig",
    "Recipe",
    "Run",
    "check_folder",
    "load_recipe",
    "prepare_folder",
    "run_recipe",
    "write_folder",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'normsmith.studies' has no attribute {name!r}")
