"""`normsmith eval`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normsmith.cli.common import JsonFlag, emit
from normsmith.cli.models import DeviceOption, TrustFlag

if TYPE_CHECKING:
    from normsmith.evaluation import Evaluation, Plan, Score
    from normsmith.studies.pairing import ItemComparison

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(name="eval")
def evaluate_model(
    model: Annotated[Path, typer.Argument(help="Folder of a causal language model with its tokenizer.")],
    suite: Annotated[str | None, typer.Option("--suite", help="A name from `normsmith ls suites`.")] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="Single benchmarks instead, with commas, as piqa,arc_easy.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with the benchmarks' files; without it, from the Hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first items of each.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Inputs per forward pass.")] = 16,
    device: DeviceOption = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="Another model's FILE from -o: compare item by item.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSON file for the scores and the value of every item.")
    ] = None,
    trust_remote_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Zero-shot benchmarks through lm-eval, with standard errors over items.

    With --data the items come from local files (docs/evaluation.md names them), otherwise lm-eval fetches its own. A
    benchmark of a suite whose data is missing is a row that says so. Compare two models on the same items, not by their
    standard errors: write one with -o, then evaluate the other with --against.

    Example: normsmith eval runs/folded --suite spheretnorm --data benchmarks -o folded.json
    """
    from normsmith.cli.models import load_any, load_tokenizer, place
    from normsmith.evaluation import check_result_path, plan_evaluation, read_evaluation
    from normsmith.studies.pairing import check_comparable, pair_items

    names = [] if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    plan = plan_evaluation(suite, names, data)
    if output is not None:
        check_result_path(output)
    other = None if against is None else read_evaluation(against)
    if other is not None:
        check_comparable(other, plan.tasks, limit)
    loaded, tokenizer = load_any(model, trust_remote_code), load_tokenizer(model, trust_remote_code)
    found = _run(place(loaded, device), tokenizer, plan, limit, batch_size, as_json)
    found = found.model_copy(update={"model": str(model)})
    if output is not None:
        found.write(output)
    pairs = [] if other is None else pair_items(found, other)
    plain = found.to_dict()
    plain.pop("items")
    if other is not None:
        plain |= {"against": other.model, "comparison": [pair.to_dict() for pair in pairs]}
    emit(plain, as_json, lambda: _text(found, pairs, "" if other is None else other.model, output))


def _run(model: Any, tokenizer: Any, plan: Plan, limit: int | None, batch_size: int, quiet: bool) -> Evaluation:
    from rich.console import Console

    from normsmith.evaluation import evaluate
    from normsmith.training import Reporter
    from normsmith.training.progress import Task

    # Bound to the stream of now: while lm-eval runs, its own bars are kept from standard error.
    with Reporter(Console(file=sys.stderr, highlight=False), quiet=quiet) as reporter:
        shown: dict[str, Task] = {}

        def tick(name: str, done: int, total: int) -> None:
            if name not in shown:
                shown[name] = reporter.task(name, total)
            shown[name].update(done)

        return evaluate(model, tokenizer, plan, limit, batch_size, tick)


def _text(found: Evaluation, pairs: list[ItemComparison], other: str, output: Path | None) -> str:
    from normsmith.surgery.table import text_table

    header = ("#", "benchmark", "metric", "value", "std. error", "items", "chance", "")
    lines = [text_table(header, [_row(score) for score in found.scores])]
    settings = found.settings
    limited = "" if settings["limit"] is None else f", only the first {settings['limit']} items of each"
    lines += ["", f"zero-shot, at most {settings['longest']} tokens, {settings['source']}{limited}"]
    missing = [score for score in found.scores if score.missing]
    lines += [f"{len(missing)} metric(s) could not be measured"] if missing else []
    if pairs:
        header = ("benchmark", "metric", "this", "other", "difference", "95 %", "p", "p (Holm)", "verdict")
        lines += ["", f"Against {other}, item by item (perplexities: difference of logarithms):"]
        lines.append(text_table(header, [_pair_row(pair) for pair in pairs]))
    lines += [] if output is None else [f"written to {output}"]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:.5g}"


def _row(score: Score) -> tuple[str, ...]:
    place = "" if score.place is None else str(score.place)
    if score.missing:
        return place, score.task, score.metric, "missing", "", "", "", score.missing
    chance = "" if score.chance is None else f"{score.chance:.3f}"
    return place, score.task, score.metric, _number(score.value), _number(score.stderr), str(score.items), chance, ""


def _pair_row(pair: ItemComparison) -> tuple[str, ...]:
    interval = "–" if pair.low is None or pair.high is None else f"[{pair.low:.4f}, {pair.high:.4f}]"
    words = {
        "better": "better",
        "worse": "worse",
        "none": "no difference seen",
        "unknown": "no verdict: one item, or all differences are equal",
    }
    return (
        pair.task,
        pair.metric,
        _number(pair.value),
        _number(pair.other),
        f"{pair.difference:+.4f}",
        interval,
        "–" if pair.p is None else f"{pair.p:.3g}",
        "–" if pair.p_adjusted is None else f"{pair.p_adjusted:.3g}",
        words[pair.outcome],
    )
