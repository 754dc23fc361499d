"""What an evaluation found: scores with standard errors, and the values of every item for pairing two models."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from normsmith.config import Config, read_mapping
from normsmith.errors import ConfigError, InputError

Form = Literal["mean", "perplexity", "bits", "other"]
"""How a metric is made of its items: a mean, exp of a weighted mean, that mean in bits, or in lm-eval's own way."""

FORMS: dict[str, Form] = {
    "perplexity": "perplexity",
    "word_perplexity": "perplexity",
    "byte_perplexity": "perplexity",
    "bits_per_byte": "bits",
}


class Score(Config):
    """One number of a benchmark, or why there is none.

    Attributes:
        task: name of the benchmark.
        metric: name of the number in it.
        value: the number; None where the task could not be run.
        stderr: its standard error over items; None where it has none.
        items: how many.
        chance: what guessing gives, for choices.
        higher: whether more is better.
        place: from 1, in the suite; None for numbers that the suite does not count.
        missing: why there is no number.
    """

    task: str
    metric: str
    value: float | None = None
    stderr: float | None = None
    items: int = 0
    chance: float | None = None
    higher: bool = True
    place: int | None = None
    missing: str = ""


class ItemValues(Config):
    """One metric's value for every item, in the order of the benchmark.

    Attributes:
        form: how the metric is made of them.
        values: the item's own value; for perplexities its negative log-likelihood in nats.
        weights: words or bytes for perplexities per word or byte, else empty.
    """

    form: Form
    values: tuple[float, ...]
    weights: tuple[float, ...] = ()


class TaskItems(Config):
    """The items of one benchmark: a hash of each, and the metrics' values."""

    source: str
    hashes: tuple[str, ...]
    metrics: dict[str, ItemValues]


class Evaluation(Config):
    """Everything that one run of `normsmith eval` found.

    Attributes:
        model: folder of the model.
        suite: its name, or None for single tasks.
        settings: number of examples in the prompt, the limit on items, the longest input, and lm-eval's version.
        scores: of all tasks.
        items: per task, for pairing.
    """

    model: str
    suite: str | None
    settings: dict[str, int | str | None]
    scores: tuple[Score, ...]
    items: dict[str, TaskItems]

    def write(self, path: Path) -> None:
        """As JSON."""
        try:
            path.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def check_result_path(path: Path) -> None:
    """Find out before hours of evaluation whether the result can be written there, over an older one at most.

    Raises:
        InputError: no such folder, a folder, a file that is no result of an evaluation, or no permission.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file in it")
    if path.exists():
        try:
            read_evaluation(path)
        except InputError:
            raise InputError(f"{path}: exists and is no result of `normsmith eval`; name another file") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written, you have no permission")


def read_evaluation(path: Path) -> Evaluation:
    """What `Evaluation.write` wrote.

    Raises:
        InputError: no such file, or not an evaluation.
    """
    try:
        return Evaluation(**read_mapping(path))
    except ConfigError as error:
        raise InputError(f"{path}: is no result of `normsmith eval` ({error})") from None


def aggregate(form: Form, values: Sequence[float], weights: Sequence[float] = ()) -> tuple[float, float | None]:
    """A metric and its standard error from its n items.

    With m = Σx/Σw (w = 1 where there are no weights) the error of m is √(n/(n−1)·Σ(x − m·w)²)/Σw, for a plain mean the
    usual s/√n. A perplexity is exp(m) with error exp(m)·se(m); bits are m/ln 2.

    Args:
        form: mean, perplexity or bits.
        values: x, one per item; for perplexities the negative log-likelihood in nats.
        weights: w, words or bytes of each item.

    Returns:
        The metric, and its error or None for a single item.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.asarray(weights, dtype=np.float64) if len(weights) else np.ones_like(x)
    n, m = len(x), float(x.sum() / w.sum())
    error = math.sqrt(n / (n - 1) * float(np.square(x - m * w).sum())) / float(w.sum()) if n > 1 else None
    if form == "mean":
        return m, error
    if form == "bits":
        return m / math.log(2), None if error is None else error / math.log(2)
    try:
        value = math.exp(m)
    except OverflowError:
        value = math.inf
    return value, None if error is None else value * error
