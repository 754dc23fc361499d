"""What a run's image classifier is worth under corruptions: RUN/robustness.json, panels for reports, and one number."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from normsmith.data import Examples, TaskData
from normsmith.data.corruptions import CORRUPTIONS, SEVERITIES, open_official
from normsmith.errors import InputError
from normsmith.evaluation.robustness import Robustness, measure_official, measure_robustness
from normsmith.report.attached import CORRUPTED, Panel
from normsmith.report.results import write_text
from normsmith.studies.files import ROBUSTNESS
from normsmith.studies.recipe import GENERATED, Recipe

BY_SEVERITY = "Accuracy by severity of the corruption"


def check_source(recipe: Recipe) -> None:
    """Refuse a folder of corrupted images that is not there.

    Raises:
        InputError: it is neither `generated` nor a folder.
    """
    source = recipe.evaluation.corruptions
    if source not in (None, GENERATED) and not Path(source).expanduser().is_dir():
        raise InputError(
            f"evaluation.corruptions={source}: there is no such folder; write generated, or the folder that holds "
            "CIFAR-10-C's .npy files"
        )


def check_corruptions(recipe: Recipe, data: Any) -> None:
    """Refuse, before anything is trained, images that could not be measured in the end.

    Raises:
        InputError: published files that are missing, damaged, of another size than the data, or with other classes;
            images too small to be corrupted.
    """
    source = recipe.evaluation.corruptions
    if source is None or not isinstance(data, TaskData):
        return
    check_source(recipe)
    size = (*(data.facts.image_size or ()), data.facts.channels)
    if source == GENERATED:
        if min(size[:2]) < 4 or size[2] not in (1, 3):
            raise InputError(
                f"evaluation.corruptions: images of {_size(size)} cannot be corrupted; expected at least 4×4 pixels "
                "and 1 or 3 channels"
            )
        return
    classes = len(data.facts.labels)
    for name in CORRUPTIONS:
        images, labels = open_official(source, name)
        if images.shape[1:] != size:
            raise InputError(
                f"{source}: {name}.npy holds images of {_size(images.shape[1:])}, {data.source} has {_size(size)}"
            )
        if (wrong := (labels < 0) | (labels >= classes)).any():
            row = int(wrong.argmax())
            raise InputError(
                f"{source}: labels.npy has the class {labels[row]} in row {row}, {data.source} only 0 to {classes - 1}"
            )


def measure_corruptions(
    model: nn.Module, recipe: Recipe, data: TaskData, folder: Path, say: Callable[[str], None]
) -> tuple[list[Panel], dict[str, float]]:
    """Accuracy of a finished run under the fifteen corruptions at five severities; all numbers go to `robustness.json`.

    What is corrupted are the test images, the first `evaluation.windows` of them where the recipe limits these.

    Args:
        model: of the run.
        recipe: of the run, which asks for it.
        data: of the run.
        folder: of the run.
        say: told that it begins, and what could not be measured: the run has its other results all the same.

    Returns:
        Panels (mean over severities of each corruption, mean over corruptions of each severity), and
        `corrupted_accuracy`, the mean over all.
    """
    source, limit, batch = recipe.evaluation.corruptions, recipe.evaluation.windows, recipe.training.batch_size
    say(f"accuracy under {len(CORRUPTIONS)} corruptions at {len(SEVERITIES)} severities")
    try:
        if source == GENERATED or source is None:
            found = measure_robustness(model, *_pixels(data.test, limit), batch_size=batch)
        else:
            found = measure_official(model, source, batch_size=batch, limit=limit)
    except InputError as error:
        say(f"corruptions: {error}")
        return [], {}
    if not math.isfinite(found.mean):
        say("corruptions: the model gives numbers that are not finite for a corrupted image")
        return [], {}
    write_text(folder / ROBUSTNESS, json.dumps({"source": source, **found.to_dict()}, indent=1) + "\n")
    return _panels(found), {"corrupted_accuracy": found.mean}


def _panels(found: Robustness) -> list[Panel]:
    names = tuple(sorted(found.accuracy))
    means = tuple(float(np.mean(found.accuracy[name])) for name in names)
    each = tuple(float(np.mean([found.accuracy[name][s - 1] for name in names])) for s in SEVERITIES)
    readable = tuple(name.replace("_", " ") for name in names)
    return [
        Panel(title=CORRUPTED, x=readable, series={"accuracy": means}, x_label="Corruption"),
        Panel(title=BY_SEVERITY, x=SEVERITIES, series={"accuracy": each}, x_label="Severity"),
    ]


def _pixels(examples: Examples, limit: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]:
    images, labels = (np.asarray(examples.columns[name]) for name in ("image", "label"))
    count = limit or len(images)
    return images[:count], labels[:count]


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape[:2])) + f" pixels and {shape[2]} channel(s)"
