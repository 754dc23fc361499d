"""A recipe: one YAML file that says which data, model, norm, connection, schedule and training make a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml
from pydantic import Field

from normsmith.config import Config, apply_overrides, read_mapping
from normsmith.connections import ConnectionConfig, connection_config
from normsmith.data import DataConfig, SourceConfig, data_config
from normsmith.errors import InputError
from normsmith.models import ModelConfig
from normsmith.norms import NormConfig, norm_config
from normsmith.schedules import ScheduleConfig, schedules
from normsmith.training import TrainingConfig

GENERATED = "generated"


class EvaluationConfig(Config):
    """How the finished model is evaluated.

    Attributes:
        windows: windows or examples of each split, 0 for all.
        diagnostics: also measure what goes on inside: with every evaluation during training how large logits and stream
            are (language models) and the gates' entropy at each site, and at the end, in diagnostics.json, the stream
            after each sublayer, update angles, fixed scales, gates and gradient norms.
        corruptions: of image classifiers also measure, at the end, the accuracy under fifteen corruptions at five
            severities: `generated` makes them from the test images, a folder is one of CIFAR-10-C's `.npy` files; in
            either case `windows` limits the images. All numbers go to robustness.json, their mean to result.json as
            `corrupted_accuracy`.
    """

    windows: int = Field(default=0, ge=0)
    diagnostics: bool = False
    corruptions: str | None = Field(default=None, min_length=1)


class Recipe(Config):
    """Everything that decides a run. `norm` and `connection` default to what the model's preset and family ask for."""

    name: str = Field(default="run", min_length=1)
    seed: int = Field(default=0, ge=0)
    data: Annotated[
        pydantic.SerializeAsAny[SourceConfig],
        pydantic.BeforeValidator(lambda value: data_config(value)),
    ] = DataConfig()
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
        pydantic.SerializeAsAny[ScheduleConfig] | None,
        pydantic.BeforeValidator(lambda value: None if value is None else schedules.config(value)),
    ] = None
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    def check(self) -> None:
        """The schedule must fit the run, and labels that are smoothed must be classes."""
        if self.training.label_smoothing and self.data.kind not in ("images", "sentences"):
            raise ValueError(
                f"training.label_smoothing is for images and sentences, the data are of the kind {self.data.kind!r}"
            )
        if self.evaluation.corruptions is not None and self.data.kind != "images":
            raise ValueError(f"evaluation.corruptions is for images, the data are of the kind {self.data.kind!r}")
        if self.schedule is not None:
            self.schedule.span(self.training.max_steps)

    @property
    def text(self) -> DataConfig:
        """The data of a language model; data of another kind raise `InputError`."""
        if not isinstance(self.data, DataConfig):
            raise InputError(f"data.kind is {self.data.kind!r}, but this needs a language model: write kind: text")
        return self.data

    def changed(self, **changes: Any) -> Recipe:
        """A new recipe with some top-level parts replaced."""
        return Recipe(**{**self.to_dict(), **changes})

    def is_written_in(self, text: str) -> bool:
        """Whether a recipe.yaml holds this recipe; one that is older than a key lacks it, and means its default."""
        if text == self.to_yaml():
            return True
        try:
            return Recipe(**yaml.safe_load(text)).to_yaml() == self.to_yaml()
        except (yaml.YAMLError, InputError, TypeError):  # no YAML, no recipe, no mapping
            return False


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe from YAML or JSON and apply `a.b=value` overrides.

    Raises:
        InputError: no such file, not a mapping, an unknown key (with the nearest one), a wrong value.
    """
    mapping = read_mapping(path)
    mapping.setdefault("name", Path(path).stem)
    return Recipe(**apply_overrides(mapping, overrides or []))
