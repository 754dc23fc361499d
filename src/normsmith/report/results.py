"""What a study found, as plain data: everything a report needs and nothing that has to be computed again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import pydantic

from normsmith.config import Config
from normsmith.errors import ConfigError, InputError


class Point(Config):
    """What was measured at one optimiser step; a quantity that was not measured there is None."""

    step: int
    loss: float | None = None
    validation_loss: float | None = None
    gate: float | None = None
    learning_rate: float | None = None
    scale_loss: float | None = None
    gradient_norm: float | None = None

    @classmethod
    def from_log(cls, entry: Mapping[str, float]) -> Self:
        """The point of one entry of the Trainer's log."""
        return cls(
            step=int(entry["step"]),
            loss=entry.get("loss"),
            validation_loss=entry.get("eval_loss"),
            gate=entry.get("gate"),
            learning_rate=entry.get("learning_rate"),
            scale_loss=entry.get("auxiliary_loss"),
            gradient_norm=entry.get("grad_norm"),
        )


class Arm(Config):
    """One trained configuration.

    `gap_percent` is the validation loss relative to the first arm's in percent, `fold_error` the largest output
    difference after folding, `seconds` the training time, and `stream_scale` the RMS of the residual stream after each
    sublayer (index 0: entry).
    """

    name: str
    label: str
    description: str = ""
    config: dict[str, Any] = pydantic.Field(default={})
    parameters: int
    seconds: float
    validation_loss: float | None = None
    perplexity: float | None = None
    gap_percent: float | None = None
    fold_error: float | None = None
    diverged: bool = False
    curve: tuple[Point, ...] = ()
    stream_scale: tuple[float, ...] = ()


class DecodeRow(Config):
    """Decode speed of one model in tokens/s: median, quartiles `low` and `high`, and `ratio` to the first row.

    A row named like an arm appears in that arm's line of the result table.
    """

    name: str
    label: str
    median: float
    low: float
    high: float
    ratio: float


class Results(Config):
    """A whole study; `recipe` is the configuration that all arms share and `command` repeats the study."""

    title: str
    command: str
    summary: str
    created: str
    seed: int
    data: dict[str, str | int | float] = pydantic.Field(default={})
    environment: dict[str, str] = pydantic.Field(default={})
    recipe: dict[str, Any] = pydantic.Field(default={})
    arms: tuple[Arm, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    notes: tuple[str, ...] = ()

    @pydantic.field_validator("arms")
    @classmethod
    def _names_differ(cls, arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
        names = [arm.name for arm in arms]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two arms are named {repeated[0]!r}")
        return arms

    def plain(self) -> dict[str, Any]:
        """The JSON values that `save` writes; floats that are not finite are strings (NaN, Infinity, -Infinity)."""
        return json.loads(self.model_dump_json())

    def save(self, path: str | Path) -> Path:
        """Write the results as JSON and return the path; a path that cannot be written raises `InputError`."""
        return write_text(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read results that `save` wrote; a missing, truncated or foreign file raises `InputError`."""
        try:
            loaded: object = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise InputError(f"{path}: not valid JSON at {place} ({error.msg}); is the file complete?") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read as text ({error})") from None
        if not isinstance(loaded, dict):
            raise InputError(f"{path}: expected the results of a study, found a JSON {type(loaded).__name__}")
        try:
            return cls.model_validate(cast("dict[str, Any]", loaded))
        except ConfigError as error:
            raise InputError(f"{path}: not the results of a study: {error}") from None


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file whole or not at all, so that an interrupted run leaves the older file as it was."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path
