"""A recipe: one YAML file that says which data, model, norm, connection, schedule and training make a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from normsmith.config import Config, apply_overrides, read_mapping
from normsmith.connections import ConnectionConfig, connection_config
from normsmith.data import DataConfig
from normsmith.models import ModelConfig
from normsmith.norms import NormConfig, norm_config
from normsmith.schedules import TaperConfig, schedules
from normsmith.training import TrainingConfig


class EvaluationConfig(Config):
    """How the finished model is evaluated: `windows` validation windows, 0 for all."""

    windows: int = Field(default=0, ge=0)


class Recipe(Config):
    """Everything that decides a run. `norm` and `connection` default to what the model's preset and family ask for."""

    name: str = Field(default="run", min_length=1)
    seed: int = Field(default=0, ge=0)
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    norm: Annotated[
        pydantic.SerializeAsAny[NormConfig] | None,
        pydantic.BeforeValidator(lambda value: None if value is None else norm_config(value)),
    ] = None
    connection: Annotated[
        pydantic.SerializeAsAny[ConnectionConfig],
        pydantic.BeforeValidator(lambda value: connection_config(value)),
    ] = connection_config("pre")
    schedule: Annotated[
        TaperConfig | None,
        pydantic.BeforeValidator(lambda value: None if value is None else schedules.config(value)),
    ] = None
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def check(self) -> None:
        """The schedule must fit the run."""
        if self.schedule is not None:
            self.schedule.span(self.training.max_steps)

    def changed(self, **changes: Any) -> Recipe:
        """A new recipe with some top-level parts replaced."""
        return Recipe(**{**self.to_dict(), **changes})


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from YAML or JSON and apply `a.b=value` overrides.

    Raises:
        InputError: no such file, not a mapping, an unknown key (with the nearest one), a wrong value.
    """
    mapping = read_mapping(path)
    mapping.setdefault("name", Path(path).stem)
    return Recipe(**apply_overrides(mapping, overrides or []))
