"""Zero-shot benchmarks through lm-eval, on a model that is already loaded."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from normsmith.data.tokenizer import table_size
from normsmith.diagnostics.blocks import evaluating
from normsmith.errors import InputError, UnknownNameError
from normsmith.evaluation.local import (
    Item,
    file_hash,
    find_file,
    local_tasks,
    read_items,
    task_config,
    wikitext_functions,
    write_items,
)
from normsmith.evaluation.results import FORMS, Evaluation, Form, ItemValues, Score, TaskItems, aggregate
from normsmith.evaluation.suites import suites
from normsmith.traits import is_causal_lm

LONGEST = 1024
"""Tokens of an input; shorter where the model's positions end before."""

Tick = Callable[[str, int, int], None]
"""Told the task, how many requests are answered, and how many there are."""


@dataclass(frozen=True)
class Plan:
    """What to evaluate: the tasks in order, why some cannot be run, and where the others' items come from.

    Attributes:
        suite: name of the suite, or None.
        tasks: names of benchmarks.
        files: the local file of each, where local files are used; empty for lm-eval's own data.
        items: what is in them.
        missing: task → why it cannot be run.
    """

    suite: str | None
    tasks: tuple[str, ...]
    files: dict[str, Path]
    items: dict[str, list[Item]]
    missing: dict[str, str]

    @property
    def local(self) -> bool:
        """Whether the items come from local files."""
        return bool(self.files)


def plan_evaluation(suite: str | None = None, tasks: Sequence[str] = (), data: Path | None = None) -> Plan:
    """Check names and files before anything is loaded.

    Args:
        suite: name of a suite; its missing files are noted, not fatal.
        tasks: names of single benchmarks, instead of a suite; a missing file is an error.
        data: folder with the benchmarks' files; without it lm-eval fetches its own from the Hub.

    Raises:
        InputError: neither or both of `suite` and `tasks`, an unknown name, no such folder, no file at all, or a line
            in one that is not an item.
    """
    if (suite is None) == (not tasks):
        raise InputError("give a suite or tasks, one of both: for instance --suite spheretnorm, or --tasks piqa,copa")
    wanted = tuple(dict.fromkeys(tasks)) if suite is None else suites.get(suite).tasks()
    if data is None:
        return Plan(suite, wanted, {}, {}, {})
    if not data.is_dir():
        raise InputError(f"{data}: no such folder; give the folder that holds the benchmarks' files")
    found = {task: find_file(task, data) for task in wanted}  # an unknown task is an error here
    files = {task: path for task, path in found.items() if path is not None}
    missing = {
        task: f"no file {' or '.join(task_config(task)['metadata']['files'])} in {data}"
        for task in wanted
        if task not in files
    }
    if missing and (suite is None or not files):
        task, reason = next(iter(missing.items()))
        raise InputError(f"{task}: {reason}, or in a folder directly below it")
    # A broken line is better found now than after hours on the benchmarks before it.
    items = {task: read_items(task, path) for task, path in files.items()}
    return Plan(suite, wanted, files, items, missing)


def evaluate(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    limit: int | None = None,
    batch_size: int = 16,
    tick: Tick | None = None,
) -> Evaluation:
    """Run the plan's benchmarks without examples in the prompt.

    Args:
        model: a causal language model of transformers (or like one), on its device.
        tokenizer: the one it was trained with.
        plan: from `plan_evaluation`.
        limit: only so many items of each benchmark, the first ones.
        batch_size: inputs per forward pass.
        tick: told what has been done.

    Returns:
        Scores with standard errors over items (see `aggregate`), and the value of every item.

    Raises:
        InputError: lm-eval is not installed, the model is no causal language model, the tokenizer does not fit it, an
            answer is longer than the model's input, or no benchmark could be loaded.
    """
    longest = check_model(model, tokenizer)
    with evaluating(model):  # lm-eval leaves a model in evaluation mode
        lm = _harness_model(model, tokenizer, longest, batch_size)
        scores, items, reasons = _answer(lm, plan, limit, tick)
    if not items or (plan.suite is None and reasons):
        name, reason = next(iter(reasons.items()))
        raise InputError(f"{name}: {reason}")
    settings = {
        "examples": 0,
        "limit": limit,
        "longest": longest,
        "source": "local files" if plan.local else "lm-eval's data",
        "lm_eval": _import_harness().__version__,
    }
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    return Evaluation(model=name, suite=plan.suite, settings=settings, scores=_ordered(scores, plan), items=items)


def _answer(
    lm: Any, plan: Plan, limit: int | None, tick: Tick | None
) -> tuple[list[Score], dict[str, TaskItems], dict[str, str]]:
    """Scores and items of what could be run, and why the rest could not."""
    scores: list[Score] = []
    items: dict[str, TaskItems] = {}
    reasons = dict(plan.missing)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        load = _local_loader(plan, Path(folder)) if plan.local else _online_loader(plan)
        for name in plan.tasks:
            loaded, source = dict[str, Any](), ""
            if name not in reasons:
                try:
                    loaded, source = load(name)
                except (ConnectionError, OSError, ValueError) as error:
                    reasons[name] = f"lm-eval could not load its data ({' '.join(str(error).split())[:200]})"
            if name in reasons:
                scores.append(Score(task=name, metric="", missing=reasons[name]))
                continue
            lm.tick = None if tick is None else partial(tick, name)
            for task, result in _run(lm, loaded, limit).items():
                scores += result.scores
                items[task] = result.items(source)
    return scores, items, reasons


def check_model(model: Any, tokenizer: Any) -> int:
    """The longest input for a model and its tokenizer.

    Raises:
        InputError: no causal language model, or a tokenizer that is not its own.
    """
    config = model.config
    if not is_causal_lm(model):
        raise InputError(f"{type(model).__name__} is no causal language model, so it has no likelihoods to compare")
    rows, highest = int(model.get_input_embeddings().weight.shape[0]), table_size(tokenizer) - 1
    if highest >= rows:
        raise InputError(
            f"the tokenizer does not match the model: its largest id is {highest}, the model embeds ids below {rows}; "
            "take the tokenizer that the model was trained with"
        )
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has neither a bos_token nor an eos_token, one of which must begin a text")
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx"))
    return min([LONGEST, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _import_harness() -> Any:
    try:
        harness = importlib.import_module("lm_eval")
        importlib.import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise InputError(
            f"zero-shot evaluation needs lm-eval ({error}): install it with pip install 'normsmith[eval]'"
        ) from None
    return harness


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Keep lm-eval's bars and remarks, which cannot be switched off, out of the user's terminal."""
    import datasets
    from transformers.utils import logging as transformers_logging

    logger, bars = logging.getLogger("lm_eval"), datasets.is_progress_bar_enabled()
    level, verbosity = logger.level, transformers_logging.get_verbosity()
    logger.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()  # long texts are cut into windows here, so no input is too long
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _harness_model(model: Any, tokenizer: Any, longest: int, batch_size: int) -> Any:
    harness = _import_harness()

    class Quiet(harness.models.huggingface.HFLM):
        """Without bars of its own; tells `tick` how many requests are answered."""

        tick: Callable[[int, int], None] | None = None
        asked = done = 0

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            found: list[float] = []
            tick, self.tick = self.tick, None  # texts are counted here, not the windows that one is cut into
            for request in requests:
                found += super().loglikelihood_rolling([request], disable_tqdm=True)
                if tick is not None:
                    tick(len(found), len(requests))
            self.tick = tick
            return found

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            self.asked, self.done = len(requests), 0
            for _, _, continuation in requests:
                if len(continuation) > longest:
                    raise InputError(f"an answer has {len(continuation)} tokens, the model reads {longest} at most")
            answers = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)
            if self.tick is not None and self.done < self.asked:  # requests that differ in one token share a pass
                self.tick(self.asked, self.asked)
            return answers

        def _model_call(self, inps: Any, attn_mask: Any = None, labels: Any = None) -> Any:
            logits = super()._model_call(inps, attn_mask, labels)
            if self.tick is not None:
                self.done = min(self.done + len(inps), self.asked)
                self.tick(self.done, self.asked)
            return logits

    with _quiet():
        return Quiet(pretrained=model, tokenizer=tokenizer, backend="causal", max_length=longest, batch_size=batch_size)


Loader = Callable[[str], tuple[dict[str, Any], str]]


def _local_loader(plan: Plan, folder: Path) -> Loader:
    """Tasks by our own task files, their items checked and written to `folder` in one form."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)

    def load(name: str) -> tuple[dict[str, Any], str]:
        path = folder / f"{name}.jsonl"
        write_items(plan.items[name], path)
        data = {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")}
        config = task_config(name) | {"dataset_kwargs": data}
        if config["metadata"]["format"] == "pages":
            config |= wikitext_functions()
        return manager.load([config])["tasks"], file_hash(plan.files[name])

    return load


def _online_loader(plan: Plan) -> Loader:
    """Tasks by lm-eval's names, with its prompts and the data that they name."""
    from lm_eval.tasks import TaskManager

    manager: Any = TaskManager()
    for name in plan.tasks:
        if name not in manager.all_tasks:
            # Thousands of names: without the nearest ones the error would be a book.
            near = UnknownNameError("task", name, manager.all_tasks)
            raise (
                near
                if "did you mean" in str(near)
                else InputError(f"unknown task {name!r}; give --data for one of {', '.join(local_tasks())}")
            )
    return lambda name: (manager.load([name])["tasks"], "lm-eval")


@dataclass(frozen=True)
class _TaskResult:
    scores: list[Score]
    hashes: tuple[str, ...]
    metrics: dict[str, ItemValues]

    def items(self, source: str) -> TaskItems:
        return TaskItems(source=source, hashes=self.hashes, metrics=self.metrics)


def _run(lm: Any, loaded: dict[str, Any], limit: int | None) -> dict[str, _TaskResult]:
    """One benchmark, or the parts of one.

    `evaluate` and not `simple_evaluate`: that one also collects facts about the machine, which takes seconds, and sets
    the process's random seeds.
    """
    from lm_eval.evaluator import evaluate as run

    for task in loaded.values():
        task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=0)
    found: Any = run(lm, {"tasks": loaded}, limit=limit, bootstrap_iters=0, log_samples=True)
    return {
        name: _result(name, found["results"][name], found["samples"][name], found["higher_is_better"][name])
        for name in loaded
    }


def _result(name: str, results: dict[str, Any], samples: list[dict[str, Any]], higher: dict[str, bool]) -> _TaskResult:
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    samples = [sample for sample in samples if sample["filter"] == filters[0]]
    counts = [len(sample["arguments"]) for sample in samples]
    chance = sum(1 / count for count in counts) / len(counts) if min(counts) > 1 else None
    scores: list[Score] = []
    metrics: dict[str, ItemValues] = {}
    for metric in samples[0]["metrics"]:
        values = _item_values(metric, [sample[metric] for sample in samples])
        if values is None or f"{metric},{filters[0]}" not in results:
            value, error = results.get(f"{metric},{filters[0]}"), None
        else:
            metrics[metric] = values
            value, error = aggregate(values.form, values.values, values.weights)
        scores.append(
            Score(
                task=name,
                metric=metric,
                value=value,
                stderr=error,
                items=len(samples),
                chance=chance if metric.startswith("acc") else None,
                higher=bool(higher.get(metric, True)),
            )
        )
    return _TaskResult(scores, tuple(sample["doc_hash"][:16] for sample in samples), metrics)


def _item_values(metric: str, raw: list[Any]) -> ItemValues | None:
    form: Form = FORMS.get(metric, "mean")
    if metric == "perplexity":
        return ItemValues(form=form, values=tuple(-float(x) for x in raw))
    if form != "mean":  # (log-likelihood, words or bytes)
        return ItemValues(form=form, values=tuple(-float(x) for x, _ in raw), weights=tuple(float(w) for _, w in raw))
    if all(isinstance(x, int | float) for x in raw):
        return ItemValues(form=form, values=tuple(float(x) for x in raw))
    return None  # F1 and its like are no means of items


def _ordered(scores: list[Score], plan: Plan) -> tuple[Score, ...]:
    """Number what the suite counts; a task that could not be run stands there with all its metrics."""
    if plan.suite is None:
        return tuple(scores)
    found: list[Score] = []
    for place, metric in enumerate(suites.get(plan.suite).metrics, 1):
        for score in scores:
            if score.task == metric.task and score.metric in (metric.name, ""):
                found.append(score.model_copy(update={"metric": metric.name, "place": place}))
    counted = {(score.task, score.metric) for score in found}
    return (*found, *(s for s in scores if s.metric and (s.task, s.metric) not in counted))
