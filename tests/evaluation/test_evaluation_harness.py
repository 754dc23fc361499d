"""Scores of lm-eval equal log-likelihoods computed by hand, token by token."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import normsmith as ns
from normsmith.errors import InputError, UnknownNameError
from normsmith.evaluation import Evaluation, Score, check_model, evaluate, harness, plan_evaluation, suites
from normsmith.evaluation.local import local_tasks, read_items, task_config
from normsmith.evaluation.results import aggregate
from normsmith.surgery.load import load_model
from tests.evaluation import benchmarks as b
from tests.tiny import tiny

pytest.importorskip("lm_eval", reason="pip install 'normsmith[eval]'")

TASKS = ("piqa", "openbookqa", "winogrande", "lambada_openai", "hellaswag", "wikitext")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return b.fill(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def found(data: Path) -> Evaluation:
    return evaluate(b.model(), b.tokenizer(), plan_evaluation(tasks=TASKS, data=data), batch_size=3)


def score(found: Evaluation, task: str, metric: str) -> Score:
    return next(s for s in found.scores if (s.task, s.metric) == (task, metric))


@torch.no_grad()
def likelihoods(model: Any, ids: list[int]) -> list[tuple[float, bool]]:
    """Log-likelihood of every token after the first, and whether it was the likeliest; one pass, one sequence."""
    logits = model(torch.tensor([ids])).logits[0].double()
    return [
        (float(logits[i - 1].log_softmax(-1)[t]), int(logits[i - 1].argmax()) == t)
        for i, t in enumerate(ids[1:], 1)
    ]  # fmt: skip


def answer(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    whole = tokenizer.encode(context + " " + continuation)
    start = len(tokenizer.encode(context))
    scored = likelihoods(model, whole)[start - 1 :]
    return sum(ll for ll, _ in scored), all(best for _, best in scored)


def picks(options: list[tuple[str, str]], lengths: list[int] | None = None) -> int:
    model, tokenizer = b.model(), b.tokenizer()
    lls = [answer(model, tokenizer, *option)[0] for option in options]
    return int(np.argmax(np.array(lls) / np.array(lengths or [1] * len(lls))))


@pytest.mark.parametrize(("task", "ending"), [("piqa", "\nAnswer:"), ("openbookqa", "")])
def test_choices_are_those_with_the_highest_likelihood(task: str, ending: str, found: Evaluation) -> None:
    right: list[bool] = []
    normed: list[bool] = []
    for item in b.CHOICES:
        options = [(item["query"].rstrip() + ending, choice) for choice in item["choices"]]
        right.append(picks(options) == item["gold"])
        normed.append(picks(options, [len(choice) for choice in item["choices"]]) == item["gold"])
    assert 0 < sum(right) < len(right), "a model that is always right or wrong shows no mistake"
    assert right != normed, "lengths must matter somewhere"
    for metric, values in (("acc", right), ("acc_norm", normed)):
        s = score(found, task, metric)
        assert found.items[task].metrics[metric].values == tuple(float(v) for v in values)
        assert s.value == pytest.approx(np.mean(values))
        assert s.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))
        assert (s.items, s.chance) == (6, pytest.approx((4 / 2 + 2 / 3) / 6))


def test_of_two_contexts_the_one_that_makes_the_continuation_likelier(found: Evaluation) -> None:
    right = [picks([(c, i["continuation"]) for c in i["context_options"]]) == i["gold"] for i in b.CONTEXTS]
    assert 0 < sum(right) < len(right)
    assert found.items["winogrande"].metrics["acc"].values == tuple(float(v) for v in right)


def test_last_words(found: Evaluation) -> None:
    model, tokenizer = b.model(), b.tokenizer()
    answers = [answer(model, tokenizer, i["context"], i["continuation"]) for i in b.LAST_WORDS]
    losses = [-ll for ll, _ in answers]
    s = score(found, "lambada_openai", "perplexity")
    assert s.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert s.stderr == pytest.approx(math.exp(np.mean(losses)) * np.std(losses, ddof=1) / math.sqrt(3), rel=1e-4)
    assert not s.higher
    assert score(found, "lambada_openai", "acc").value == np.mean([best for _, best in answers])


def test_wikitext_per_word_of_the_original_text(found: Evaluation, data: Path) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    model, tokenizer = b.model(), b.tokenizer()
    pages = [item["page"] for item in read_items("wikitext", data / "text/wiki.test.raw")]
    assert [page.split("\n")[0] for page in pages] == [" = The Plant =", " = Surgeons ="]
    values = found.items["wikitext"].metrics["word_perplexity"]
    assert values.weights == tuple(float(len(re.split(r"\s+", page))) for page in pages)
    assert "2.5 leaves" in wikitext_detokenizer({"page": pages[0]})
    for value, page in zip(values.values, pages, strict=True):
        ids = [tokenizer.bos_token_id, *tokenizer.encode(wikitext_detokenizer({"page": page}))]
        assert value == pytest.approx(rolling(model, ids, 96), rel=1e-5)
    s = score(found, "wikitext", "word_perplexity")
    assert s.value == pytest.approx(math.exp(sum(values.values) / sum(values.weights)))


def rolling(model: Any, ids: list[int], longest: int) -> float:
    """Windows of `longest` tokens, every token predicted once; the last window reaches back."""
    total = 0.0
    for start in range(0, len(ids) - 1, longest):
        end = min(start + longest, len(ids) - 1)
        window = ids[max(0, end - longest) : end + 1]
        total -= sum(ll for ll, _ in likelihoods(model, window)[-(end - start) :])
    return total


def test_inputs_are_cut_at_the_protocols_length_where_the_model_could_read_more(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    monkeypatch.setattr(harness, "LONGEST", 24)
    found = evaluate(b.model(), b.tokenizer(), plan_evaluation(tasks=["wikitext"], data=data))
    assert found.settings["longest"] == 24
    pages = [item["page"] for item in read_items("wikitext", data / "text/wiki.test.raw")]
    ids = [[0, *b.tokenizer().encode(wikitext_detokenizer({"page": page}))] for page in pages]
    expected = [rolling(b.model(), row, 24) for row in ids]
    assert found.items["wikitext"].metrics["word_perplexity"].values == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx([rolling(b.model(), row, 96) for row in ids], rel=1e-3)


def test_hellaswag_in_its_text_form(found: Evaluation) -> None:
    right = [
        picks([(item["query"].strip(), c) for c in (item["choices"] * 4)[:4]]) == item["gold"] for item in b.CHOICES[:2]
    ]
    assert found.items["hellaswag"].metrics["acc"].values == tuple(float(v) for v in right)


def test_standard_errors_of_ratios_agree_with_resampling() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(20, 200, 400).astype(float)
    losses = words * rng.normal(2, 0.3, 400)
    value, error = aggregate("perplexity", losses, words)
    rows = rng.integers(0, 400, (4000, 400))
    resampled = np.exp(losses[rows].sum(1) / words[rows].sum(1))
    assert value == pytest.approx(math.exp(losses.sum() / words.sum()))
    assert error == pytest.approx(resampled.std(), rel=0.05)
    assert aggregate("mean", [1.0])[1] is None
    assert aggregate("bits", losses, words)[0] == pytest.approx(losses.sum() / words.sum() / math.log(2))


def test_a_suite_says_what_is_missing(data: Path) -> None:
    model = b.model().train()
    found = evaluate(model, b.tokenizer(), plan_evaluation("spheretnorm", data=data), limit=2)
    assert all(module.training for module in model.modules())
    counted = [s for s in found.scores if s.place is not None]
    assert [s.place for s in counted] == list(range(1, 13))
    assert [(s.task, s.metric) for s in counted] == [(m.task, m.name) for m in suites.get("spheretnorm").metrics]
    missing = {s.task for s in counted if s.missing}
    assert missing == {"arc_easy", "arc_challenge", "sciq", "boolq", "social_iqa"}
    assert all((s.value is None) == bool(s.missing) for s in counted)
    assert score(found, "piqa", "acc").place is None
    assert score(found, "piqa", "acc").items == 2


def test_every_task_of_every_suite_can_be_local() -> None:
    for name in suites:
        assert set(suites.get(name).tasks()) <= set(local_tasks())
        for metric in suites.get(name).metrics:
            assert metric.name in [m["metric"] for m in task_config(metric.task)["metric_list"]]
    assert len(suites.get("spheretnorm").metrics) == 12
    assert len(suites.get("spheretnorm").tasks()) == 11


def test_wrong_names_and_folders(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown suite 'spheretnrom'; did you mean 'spheretnorm'"):
        plan_evaluation("spheretnrom")
    with pytest.raises(UnknownNameError, match="unknown task 'pica'; did you mean 'piqa'"):
        plan_evaluation(tasks=["pica"], data=data)
    with pytest.raises(InputError, match="one of both"):
        plan_evaluation()
    with pytest.raises(InputError, match=r"sciq: no file sciq.jsonl in"):
        plan_evaluation(tasks=["piqa", "sciq"], data=data)
    with pytest.raises(InputError, match=r"no file lambada_openai.jsonl in .*directly below"):
        plan_evaluation("spheretnorm", data=tmp_path)
    with pytest.raises(InputError, match="nowhere: no such folder"):
        plan_evaluation("spheretnorm", data=Path("nowhere"))


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("piqa", "piqa.jsonl", '{"query": "a", "choices": ["b"], "gold": 0}\n{"query": ', "line 2: is not JSON"),
        ("piqa", "piqa.jsonl", '\n{"query": "a", "choices": ["b"]}', "line 2: 'gold' must be a int"),
        ("piqa", "piqa.jsonl", '{"query": "a", "choices": ["b", "c"], "gold": 2}', "line 1: 'gold' is 2, but there"),
        ("piqa", "piqa.jsonl", '{"query": "a", "choices": ["b", 3], "gold": 1}', "line 1: holds a choice that is no"),
        ("piqa", "piqa.jsonl", '["a"]', "line 1: is a list, expected an object with the keys query, choices, gold"),
        ("piqa", "piqa.jsonl", "\n\n", "holds no item of piqa"),
        ("hellaswag", "hellaswag_val_full.txt", "a\n0\nb\nc\nd\ne\nf\n7\n", "line 7: an item is a context"),
        ("hellaswag", "hellaswag_val_full.txt", "a\n0\nb\nc\nd\ne\nf\n", "line 7: an item is a context"),
        ("hellaswag", "hellaswag_val_full.txt.bz2", "no archive", "cannot be read as text"),
        ("lambada_openai", "lambada_openai.jsonl", '{"context": "a", "continuation": ""}', "line 1: 'continuation'"),
    ],
)
def test_broken_files_are_named_with_the_line(task: str, name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_items(task, tmp_path / name)
    assert name in str(caught.value)


def test_a_tokenizer_or_model_that_does_not_fit(data: Path) -> None:
    plan = plan_evaluation(tasks=["piqa"], data=data)
    small = tiny("llama", vocab_size=200)
    with pytest.raises(InputError, match=r"largest id is \d+, the model embeds ids below 200"):
        evaluate(small, b.tokenizer(), plan)
    highest = max(b.tokenizer().get_vocab().values())
    with pytest.raises(InputError, match=f"largest id is {highest}, the model embeds ids below {highest};"):
        check_model(tiny("llama", vocab_size=highest), b.tokenizer())
    assert check_model(tiny("llama", vocab_size=highest + 1), b.tokenizer()) == 64
    assert check_model(tiny("llama", vocab_size=300, max_position_embeddings=4096), b.tokenizer()) == 1024
    with pytest.raises(InputError, match="no causal language model"):
        evaluate(tiny("bert", vocab_size=300), b.tokenizer(), plan)
    short = tiny("llama", vocab_size=300, max_position_embeddings=2)
    with pytest.raises(InputError, match="an answer has . tokens, the model reads 2 at most"):
        evaluate(short, b.tokenizer(), plan)


def test_without_lm_eval_it_says_what_to_install(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"install it with pip install 'normsmith\[eval\]'"):
        evaluate(b.model(), b.tokenizer(), plan_evaluation(tasks=["piqa"], data=data))


@pytest.mark.parametrize("mode", ["taper", "affine"])
def test_a_folded_model_answers_as_before(mode: str, data: Path, tmp_path: Path) -> None:
    """Export through lm-eval: tapered and folded, or with its gains folded, saved and loaded again."""
    model = b.model()
    if mode == "taper":
        controller = ns.taper_(model, ns.TaperConfig(scale_loss=0), steps=3)
        model.train()
        for _ in range(3):
            model(input_ids=torch.randint(300, (2, 8)))
            controller.step()
        controller.close()
    plan = plan_evaluation(tasks=TASKS, data=data)
    before = evaluate(model.eval(), b.tokenizer(), plan)
    ns.fold_(model, **({} if mode == "taper" else {"mode": "affine"}))
    model.save_pretrained(tmp_path / "folded")
    b.tokenizer().save_pretrained(tmp_path / "folded")
    again = load_model(tmp_path / "folded", trust_remote_code=True)
    after = evaluate(again, AutoTokenizer.from_pretrained(tmp_path / "folded"), plan)
    for one, two in zip(before.scores, after.scores, strict=True):
        assert (one.task, one.metric, one.items) == (two.task, two.metric, two.items)
        assert two.value == pytest.approx(one.value, rel=1e-4)
    assert before.items["piqa"].hashes == after.items["piqa"].hashes
