"""Accuracy of an image classifier under corruptions: a number, a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import nn

from normsmith.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, read_official
from normsmith.data.examples import Examples
from normsmith.data.vision import finish
from normsmith.errors import InputError
from normsmith.evaluation.metrics import ACCURACY, score


@dataclass(frozen=True)
class Robustness:
    """Accuracies of one model.

    Attributes:
        clean: on the images as they are; None where there are none (official files).
        accuracy: corruption → accuracy at severities 1 to 5.
    """

    clean: float | None
    accuracy: dict[str, tuple[float, ...]]

    @property
    def mean(self) -> float:
        """Mean accuracy over corruptions and severities."""
        return float(np.mean([value for values in self.accuracy.values() for value in values]))

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"clean": self.clean, "mean": self.mean, "accuracy": {k: list(v) for k, v in self.accuracy.items()}}

    def markdown(self) -> str:
        """A table with a row per corruption, the hardest first."""
        lines = ["| Corruption | Mean | " + " | ".join(f"Severity {s}" for s in SEVERITIES) + " |"]
        lines.append("| --- |" + " ---: |" * (1 + len(SEVERITIES)))
        for name, values in sorted(self.accuracy.items(), key=lambda item: sum(item[1])):
            cells = " | ".join(f"{100 * value:.1f} %" for value in (np.mean(values), *values))
            lines.append(f"| {name.replace('_', ' ')} | {cells} |")
        clean = "" if self.clean is None else f", without corruption {100 * self.clean:.1f} %"
        return "\n".join([*lines, "", f"Mean accuracy over all: {100 * self.mean:.1f} %{clean}"])


def measure_robustness(
    model: nn.Module,
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[Any],
    names: Sequence[str] = tuple(CORRUPTIONS),
    seed: int = 0,
    batch_size: int = 256,
) -> Robustness:
    """Accuracy on images (n, h, w, c) uint8 after each corruption at each severity; all models see the same pixels.

    Raises:
        InputError: no images, an unknown corruption, or images that the model does not take.
    """
    if not len(images) or len(images) != len(labels):
        raise InputError(f"{len(images)} images with {len(labels)} labels: give as many of each, and one at least")
    _check_names(names)

    def accuracy(pixels: npt.NDArray[np.uint8]) -> float:
        return score(model, Examples({"image": pixels, "label": labels}, finish), ACCURACY, batch_size).metric

    found = {name: tuple(accuracy(corrupt(images, name, s, seed)) for s in SEVERITIES) for name in names}
    return Robustness(accuracy(images), found)


def measure_official(
    model: nn.Module,
    folder: str | Path,
    names: Sequence[str] = tuple(CORRUPTIONS),
    batch_size: int = 256,
    limit: int = 0,
) -> Robustness:
    """The same on the published images of CIFAR-10-C (or CIFAR-100-C), read from their `.npy` files.

    `limit` takes the first images of every severity, 0 all of them.
    """
    _check_names(names)
    found: dict[str, tuple[float, ...]] = {}
    for name in names:
        values: list[float] = []
        for severity in SEVERITIES:
            images, labels = read_official(folder, name, severity)
            chosen = slice(limit or None)
            examples = Examples({"image": images[chosen], "label": labels[chosen]}, finish)
            values.append(score(model, examples, ACCURACY, batch_size).metric)
        found[name] = tuple(values)
    return Robustness(None, found)


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise InputError("names is empty: name at least one corruption, or leave it out for all fifteen")


def draw_robustness(results: dict[str, Robustness], path: str | Path) -> Path:
    """Bars of the mean accuracy per corruption, one colour per model; return the path of the picture.

    Raises:
        InputError: no results, or models that were measured on different corruptions.
    """
    from matplotlib.figure import Figure

    if not results:
        raise InputError("no results to draw; give at least one model's")
    first, *others = results
    names = sorted(results[first].accuracy)
    for other in others:
        if differing := sorted(results[first].accuracy.keys() ^ results[other].accuracy.keys()):
            raise InputError(
                f"{first} and {other} were measured on different corruptions ({differing[0]} of one only); measure all "
                "with the same names"
            )
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = cast("Any", figure.add_subplot())
    width = 0.8 / len(results)
    for place, (label, result) in enumerate(results.items()):
        heights = [100 * float(np.mean(result.accuracy[name])) for name in names]
        axes.bar(np.arange(len(names)) + (place - (len(results) - 1) / 2) * width, heights, width, label=label)
        if result.clean is not None:
            axes.axhline(100 * result.clean, color=f"C{place}", linestyle=":", linewidth=1)
    axes.set_xticks(np.arange(len(names)), [name.replace("_", " ") for name in names], rotation=45, ha="right")
    axes.set_ylabel("Accuracy in %")
    axes.set_title("Mean over severities 1 to 5; dotted: without corruption", fontsize="medium")
    axes.set_ylim(0, 100)
    axes.margins(x=0.01)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")  # bars leave no room for it
    figure.savefig(path, dpi=150)
    return Path(path)
