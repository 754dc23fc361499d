"""Loss and metric of a model with labelled examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from normsmith.data import collate
from normsmith.data.examples import IGNORED
from normsmith.errors import InputError


@dataclass(frozen=True)
class TaskMetric:
    """What a task reports beside its loss.

    Attributes:
        name: `accuracy` or `rmse`.
        better: whether a `higher` or a `lower` value is better.
        of: (labels, predictions) → value.
    """

    name: str
    better: Literal["higher", "lower"]
    of: Callable[[npt.NDArray[Any], npt.NDArray[Any]], float]


@dataclass(frozen=True)
class TaskScore:
    """Loss and metric on one split."""

    loss: float
    metric: float


def _accuracy(labels: npt.NDArray[Any], predictions: npt.NDArray[Any]) -> float:
    from sklearn.metrics import accuracy_score  # type: ignore[import-untyped]  # ships no types

    return float(cast("Any", accuracy_score)(labels, predictions))


def _rmse(labels: npt.NDArray[Any], predictions: npt.NDArray[Any]) -> float:
    from sklearn.metrics import root_mean_squared_error  # type: ignore[import-untyped]

    return float(cast("Any", root_mean_squared_error)(labels, predictions))


ACCURACY = TaskMetric("accuracy", "higher", _accuracy)
RMSE = TaskMetric("rmse", "lower", _rmse)


@torch.no_grad()
def predict(model: nn.Module, examples: Dataset[Any], batch_size: int = 64) -> tuple[float, Tensor, Tensor]:
    """Mean loss over the labels, and labels and outputs (float32) of all of them, in evaluation mode, on the CPU.

    Classes (n,) come with logits (n, classes); of tagged sentences only the labelled tokens count; targets (n, t) come
    with predictions (n, t).

    Raises:
        InputError: a label that is no class of the model.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), device=device)
    found: list[tuple[Tensor, Tensor]] = []
    rows = 0
    try:
        for batch in DataLoader(examples, batch_size=batch_size, collate_fn=collate):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            _check_labels(model, batch["labels"], rows)
            rows += len(batch["labels"])
            outputs, labels = model(**batch), batch["labels"]
            kept = labels != IGNORED if not labels.is_floating_point() else torch.ones_like(labels[:, 0]).bool()
            total += outputs.loss.double() * kept.sum()
            count += kept.sum()
            found.append((labels[kept], outputs.logits[kept].float()))
    finally:
        for module, mode in modes.items():
            module.training = mode
    labels, outputs = (torch.cat([pair[i].cpu() for pair in found]) for i in (0, 1))
    return float(total / count), labels, outputs


def _check_labels(model: nn.Module, labels: Tensor, first: int) -> None:
    classes = getattr(getattr(model, "config", None), "num_labels", None)
    if classes is None or labels.is_floating_point():
        return
    wrong = (((labels < 0) & (labels != IGNORED)) | (labels >= classes)).reshape(len(labels), -1)
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        label = int(labels.reshape(len(labels), -1)[row][wrong[row]][0])
        raise InputError(
            f"example {first + row} has the label {label}, but the model knows the classes 0 to {classes - 1} only"
        )


def score(model: nn.Module, examples: Dataset[Any], metric: TaskMetric, batch_size: int = 64) -> TaskScore:
    """Loss and metric of a model on labelled examples: `accuracy` of classes or tags, `rmse` in the target's unit."""
    loss, labels, outputs = predict(model, examples, batch_size)
    predictions = outputs if labels.is_floating_point() else outputs.argmax(-1)
    if not bool(outputs.isfinite().all()):
        return TaskScore(loss, float(np.nan))
    return TaskScore(loss, metric.of(labels.numpy(), predictions.numpy()))
