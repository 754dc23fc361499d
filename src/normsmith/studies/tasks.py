"""What a recipe's kind of data decides: the model's head, its training data, its loss and its metric."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from normsmith import ranks
from normsmith.data import Facts, PackedWindows, TaskData, TextData, TrainingExamples, collate
from normsmith.data.examples import smoothed
from normsmith.errors import InputError, UnknownNameError
from normsmith.evaluation.metrics import ACCURACY, RMSE, TaskMetric, TaskScore, score
from normsmith.evaluation.perplexity import language_loss
from normsmith.models import (
    NormsmithConfig,
    NormsmithForCausalLM,
    NormsmithForImageClassification,
    NormsmithForSequenceClassification,
    NormsmithForTableRegression,
    NormsmithForTokenClassification,
    NormsmithPreTrainedModel,
    NormsmithTableConfig,
    NormsmithVisionConfig,
)
from normsmith.studies.corrupted import check_corruptions
from normsmith.studies.recipe import Recipe

Data = TextData | TaskData


@dataclass(frozen=True)
class Task:
    """A kind of data seen as something to learn.

    Attributes:
        model: the trunk with the right head.
        config: the class of its configuration.
        options: what the data add to the configuration.
        metric: what is reported beside the loss; None for language models, whose loss says it all.
    """

    model: Callable[..., NormsmithPreTrainedModel]
    config: type[NormsmithConfig]
    options: Callable[[Facts], dict[str, Any]]
    metric: TaskMetric | None


def _classes(facts: Facts) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(facts.labels)),
        "label2id": {label: number for number, label in enumerate(facts.labels)},
    }


def _tokens(facts: Facts) -> dict[str, Any]:
    return {"causal": False, **_classes(facts)}


def _image(facts: Facts) -> dict[str, Any]:
    shape = {"image_size": list(facts.image_size), "num_channels": facts.channels}
    return {**shape, "positions": "learned", "causal": False, **_classes(facts)}


def _table(facts: Facts) -> dict[str, Any]:
    sizes = {"num_features": len(facts.features), "num_targets": len(facts.targets)}
    return {**sizes, "positions": "none", "causal": False}


TASKS = {
    "text": Task(NormsmithForCausalLM, NormsmithConfig, lambda _: {}, None),
    "images": Task(NormsmithForImageClassification, NormsmithVisionConfig, _image, ACCURACY),
    "tagging": Task(NormsmithForTokenClassification, NormsmithConfig, _tokens, ACCURACY),
    "sentences": Task(NormsmithForSequenceClassification, NormsmithConfig, _tokens, ACCURACY),
    "table": Task(NormsmithForTableRegression, NormsmithTableConfig, _table, RMSE),
}


def task_of(recipe: Recipe) -> Task:
    """The task that the recipe's data pose."""
    return TASKS[recipe.data.kind]


def check_metric(recipe: Recipe, name: str | None) -> None:
    """Refuse a metric that runs of the recipe do not report, before they are carried out.

    Raises:
        UnknownNameError: neither `loss` nor the task's metric.
    """
    metric = task_of(recipe).metric
    known = ["loss", *([] if metric is None else [metric.name])]
    if name is not None and name not in known:
        raise UnknownNameError("metric", name, known, where=f"data of the kind {recipe.data.kind!r}")


def known_facts(recipe: Recipe) -> Facts:
    """What is known of the data before they are read; the size of images that is not known is one that fits."""
    facts = recipe.data.facts()
    if recipe.data.kind == "images" and recipe.data.source != "digits":
        return dataclasses.replace(facts, image_size=(8 * recipe.model.patch_size,) * 2)
    return facts


def model_config(recipe: Recipe, facts: Facts) -> NormsmithConfig:
    """The configuration of the recipe's model.

    Raises:
        InputError: sizes, norm or connection that do not fit together.
    """
    task = task_of(recipe)
    changes: dict[str, Any] = {"connection": recipe.connection.to_dict(), **task.options(facts)}
    if recipe.norm is not None:
        changes["norm"] = recipe.norm.to_dict()
    return recipe.model.build(facts.vocab_size, max(facts.length, 1024), task.config, **changes)


def give_moments_(model: nn.Module, data: Data) -> None:
    """Let a model that standardises its inputs know their mean and spread. In place."""
    if not isinstance(data, TaskData) or data.moments is None:
        return
    moments = data.moments
    for module, mean, scale in (("standardise", "mean", "scale"), ("target", "target_mean", "target_scale")):
        if hasattr(model, module) and mean in moments:
            getattr(model, module).set_(moments[mean], moments[scale])


@dataclass(frozen=True)
class Parts:
    """The data of one run: what is trained on, what decides, what is looked at once, and how items become a batch."""

    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any] | None
    collate: Callable[..., Any] | None


def parts_of(recipe: Recipe, data: Data) -> Parts:
    """The data sets of a run, which the seed orders and augments; evaluation is limited as the recipe says."""
    # What all processes read together: accelerate gives every process its part of each batch of this one order.
    items = recipe.training.sequences * ranks.world_size()
    count, limit = recipe.evaluation.windows, limited
    if isinstance(data, TextData):
        length = recipe.text.sequence_length
        train = PackedWindows(data.train, length, recipe.seed, items)
        test = None if data.test is None else limit(PackedWindows(data.test, length), count)
        return Parts(train, limit(PackedWindows(data.validation, length), count), test, None)
    change = smoothed(data.change, recipe.training.label_smoothing, len(data.facts.labels))
    train = TrainingExamples(data.train, recipe.seed, items, change)
    return Parts(train, limit(data.validation, count), limit(data.test, count), collate)


def limited(examples: Dataset[Any], count: int) -> Dataset[Any]:
    """The first `count` examples, all of them for 0."""
    length = len(examples)  # pyright: ignore[reportArgumentType] (every data set here has a length)
    return Subset(examples, range(count)) if 0 < count < length else examples


def judge(recipe: Recipe, model: nn.Module, examples: Dataset[Any]) -> TaskScore:
    """Loss and metric on some examples; a language model has no metric (NaN)."""
    metric = task_of(recipe).metric
    if metric is None:
        return TaskScore(language_loss(model, examples, recipe.training.batch_size), float("nan"))
    return score(model, examples, metric, recipe.training.batch_size)


def badness(recipe: Recipe, model: nn.Module, examples: Dataset[Any]) -> float:
    """The number by which runs of the recipe are judged, turned over where higher is better."""
    metric, found = task_of(recipe).metric, judge(recipe, model, examples)
    if metric is None:
        return found.loss
    return found.metric if metric.better == "lower" else -found.metric


def check_data(recipe: Recipe, data: Data) -> None:
    """Refuse, before a study of it is begun, a recipe that its data do not fit now that they are known.

    Raises:
        InputError: images that the patch does not divide, corrupted images that could not be measured.
    """
    model_config(recipe, facts_of(data))
    check_corruptions(recipe, data)


def facts_of(data: Data) -> Facts:
    """What the data that were read tell the model."""
    return data.facts if isinstance(data, TaskData) else Facts(vocab_size=data.vocab_size)


def new_model(recipe: Recipe, facts: Facts | int) -> NormsmithPreTrainedModel:
    """The recipe's model with its initial weights, which the seed decides; a number is the size of a vocabulary."""
    if isinstance(facts, int):
        if recipe.data.kind != "text":
            raise InputError(f"a model for {recipe.data.kind} needs more than a vocabulary: give Facts")
        facts = Facts(vocab_size=facts, length=recipe.text.sequence_length)
    config = model_config(recipe, facts)
    torch.manual_seed(recipe.seed)
    return task_of(recipe).model(config)
