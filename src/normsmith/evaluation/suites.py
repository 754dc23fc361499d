"""Suites: which metrics of which benchmarks are reported together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normsmith.registry import Registry


@dataclass(frozen=True)
class Metric:
    """One number of a suite: lm-eval's name of the task and of the metric in it."""

    task: str
    name: str


class Suite:
    """A named list of metrics; a new suite is one class with `metrics`."""

    kind: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]

    @classmethod
    def tasks(cls) -> tuple[str, ...]:
        """The benchmarks, each once, in the order of the metrics."""
        return tuple(dict.fromkeys(metric.task for metric in cls.metrics))


suites: Registry[type[Suite]] = Registry("suite")


def _metrics(name: str, *tasks: str) -> tuple[Metric, ...]:
    return tuple(Metric(task, name) for task in tasks)


@suites.register("spheretnorm")
class SpheretNormSuite(Suite):
    """12 metrics over 11 benchmarks, zero-shot: LAMBADA, WikiText-2 and nine tasks of common sense and science.

    The paper (arXiv 2608.02668) names LAMBADA and WikiText-2 and says 12 metrics over 11 benchmarks; the other nine are
    the list that its predecessor cites (arXiv 2601.22095).
    """

    metrics = (
        Metric("lambada_openai", "perplexity"),
        Metric("lambada_openai", "acc"),
        Metric("wikitext", "word_perplexity"),
        *_metrics("acc_norm", "hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa", "sciq"),
        *_metrics("acc", "winogrande", "boolq", "social_iqa"),
    )


@suites.register("plain-files")
class PlainFilesSuite(Suite):
    """11 metrics over the 10 benchmarks that are published as plain JSONL or text, with COPA and Winograd's schemas."""

    metrics = (
        Metric("lambada_openai", "perplexity"),
        Metric("lambada_openai", "acc"),
        Metric("wikitext", "word_perplexity"),
        *_metrics("acc_norm", "hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa"),
        *_metrics("acc", "winogrande", "copa", "wsc273"),
    )
