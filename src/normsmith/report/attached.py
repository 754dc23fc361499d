"""What can lie beside a study's runs and is shown with them: published figures, decode speeds, values per layer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar, cast

import pydantic

from normsmith.config import Config
from normsmith.errors import ConfigError, InputError
from normsmith.report.results import DecodeRow

CORRUPTED = "Accuracy under corruption"
"""Title of the panel whose places are corruptions: reports make a table of it."""

_C = TypeVar("_C", bound=Config)


class Published(Config):
    """A figure that somebody else reported: one object of `STUDY/published.json`.

    Attributes:
        arm: the arm of the study it belongs to, as typed; any other name is shown too, without a figure of ours.
        metric: what was measured. Ours stands beside it where the study measured a metric of that name.
        value: the figure.
        unit: of the value.
        source: where it is printed, precisely enough to find it (arXiv number, version, table).
        note: what differs from our setting, or how the figure was made.
    """

    arm: str = pydantic.Field(min_length=1)
    metric: str = pydantic.Field(min_length=1)
    value: float
    unit: str = ""
    source: str = pydantic.Field(min_length=1)
    note: str = ""

    def check(self) -> None:
        """A figure is a number."""
        if not math.isfinite(self.value):
            raise ValueError(f"the value {self.value} is no finite number")


class Panel(Config):
    """Something measured per layer or per anything else: one object of `RUN/diagnostics.json`.

    Attributes:
        title: runs' panels of one title are drawn in one picture.
        x: places, as numbers or as names.
        series: name → one value for each place; null where there is none.
        unit: of the values.
        x_label: what the places are.
    """

    title: str = pydantic.Field(min_length=1)
    x: tuple[float | str, ...] = pydantic.Field(min_length=1)
    series: dict[str, tuple[float | None, ...]] = pydantic.Field(min_length=1)
    unit: str = ""
    x_label: str = "Layer"

    def check(self) -> None:
        """Every series must have one value for each place."""
        for name, values in self.series.items():
            if len(values) != len(self.x):
                raise ValueError(f"the series {name!r} has {len(values)} values for {len(self.x)} places")


def read_published(path: Path) -> tuple[Published, ...]:
    """The published figures attached to a study; none where there is no such file.

    Raises:
        InputError: the file is not a list of such figures.
    """
    return tuple(_each(Published, path, item, i) for i, item in enumerate(_list(path), 1))


def read_decode(path: Path) -> tuple[DecodeRow, ...]:
    """Decode speeds, as `normsmith bench decode --json` prints them; none where there is no such file.

    Raises:
        InputError: the file is not a list of such rows.
    """
    items = _list(path)
    batches = {str(item.get("batch")) for item in items if isinstance(item, dict)}

    def row_of(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        label = item.get("label", item.get("name"))
        if len(batches) > 1:  # several measurements, each with ratios to a first row of its own
            label = f"{label}, batch {item.get('batch')}"
        return {**{k: v for k, v in item.items() if k in DecodeRow.model_fields}, "label": label}

    return tuple(_each(DecodeRow, path, row_of(item), i) for i, item in enumerate(items, 1))


def read_panels(path: Path) -> tuple[Panel, ...]:
    """What one run measured per layer; none where there is no such file.

    Raises:
        InputError: the file is not a list of such panels.
    """
    return tuple(_each(Panel, path, item, i) for i, item in enumerate(_list(path), 1))


def _list(path: Path) -> list[Any]:
    try:
        loaded: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(loaded, list):
        raise InputError(f"{path}: expected a JSON list, found {type(loaded).__name__}")
    return cast("list[Any]", loaded)


def _each(kind: type[_C], path: Path, item: Any, number: int) -> _C:
    try:
        if not isinstance(item, dict):
            raise ConfigError(f"expected an object, found {item!r}")
        return kind(**cast("dict[str, Any]", item))
    except (ConfigError, TypeError) as error:
        raise InputError(f"{path}: entry {number}: {error}") from None
