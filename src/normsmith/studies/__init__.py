"""Recipes, and what carries them out."""

from normsmith.folders import check_folder, prepare_folder, write_folder
from normsmith.studies.recipe import EvaluationConfig, Recipe, load_recipe
from normsmith.studies.runner import Run, run_recipe

__all__ = [
    "EvaluationConfig",
    "Recipe",
    "Run",
    "check_folder",
    "load_recipe",
    "prepare_folder",
    "run_recipe",
    "write_folder",
]
