"""What a study's folder may hold, and the table that is made of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normsmith.data import TextData
from normsmith.errors import InputError
from normsmith.studies import Recipe
from normsmith.studies.cells import FAILURE, Outcome, read_metrics, record_failure
from normsmith.studies.comparison import Comparison, read_comparison
from normsmith.studies.study import Study, make_study, plan_study
from normsmith.studies.tables import comma_separated, markdown, terminal, write_tables
from tests.studies.small import ARMS, plan_of

# What a folder may hold


def loss(path: Path, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "validation_loss": value}))


DAMAGE: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda run: loss(run / "result.json", math.nan), "refused", "holds no finite loss"),
    (lambda run: loss(run / "result.json", "3.1"), "refused", "holds no finite loss"),
    (lambda run: (run / "result.json").write_text('{"validation_loss": 3.'), "refused", "cannot be read: cut short"),
    (lambda run: (run / "result.json").write_text("[]"), "refused", "cannot be read"),
    (lambda run: (run / "recipe.yaml").unlink(), "refused", "recipe.yaml or environment.json is missing or can"),
    (lambda run: (run / "environment.json").unlink(), "refused", "recipe.yaml or environment.json is missing or can"),
    (lambda run: (run / ".normsmith").unlink(), "refused", "was not written by normsmith"),
    (lambda run: shutil.copy(run.parent / "2/recipe.yaml", run), "refused", "another study's, or edited by hand"),
    (
        lambda run: (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("0.01", "0.02")),
        "refused",
        "edited by hand",
    ),
    (
        lambda run: (run / "environment.json").write_text('{"normsmith": "0.1.0", "data_sha256": "0"}'),
        "refused",
        "read other data",
    ),
    (lambda run: (run / "result.json").unlink(), "open", ""),
    (lambda run: (run / FAILURE).write_text("{"), "failed", "no reason recorded"),
]


@pytest.mark.parametrize(("damage", "state", "note"), DAMAGE)
def test_a_damaged_run_is_marked_and_never_counted(
    damage: Callable[[Path], object], state: str, note: str, copied: Path
) -> None:
    whole = read_comparison(copied)
    damage(copied / "layernorm/1")
    found = read_comparison(copied)
    row = next(run for run in found.runs if (run.arm, run.seed) == ("layernorm", 1))
    assert row.state == state
    assert note in row.note
    assert row.validation_loss is None
    assert found.arms[1].counts == {"finished": 2, state: 1}
    assert found.arms[1].paired is not None
    assert found.arms[1].paired.pairs == 2
    assert (found.arms[0], found.arms[2].mean) == (whole.arms[0], whole.arms[2].mean)
    assert f"2 of 3 (1 {state})" in markdown(found)


def test_a_run_that_is_older_than_a_key_of_its_recipe(copied: Path) -> None:
    whole = read_comparison(copied)
    for path in copied.glob("*/*/recipe.yaml"):
        text = path.read_text()
        assert text.count("  keep: last\n") == text.count("  clip: 1.0\n") == 1
        path.write_text(text.replace("  keep: last\n", "").replace("  clip: 1.0\n", ""))
    (copied / ".recipes.json").unlink(missing_ok=True)
    assert read_comparison(copied) == whole
    assert (copied / ".recipes.json").is_file()
    assert read_comparison(copied) == whole  # as remembered
    path = copied / "layernorm/1/recipe.yaml"
    path.write_text(path.read_text().replace("  learning_rate: 0.01\n", ""))
    (copied / ".recipes.json").unlink()
    assert read_comparison(copied).arms[1].counts == {"finished": 2, "refused": 1}


def test_cut_and_illegible_metrics(copied: Path) -> None:
    path = copied / "rmsnorm/0/metrics.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    path.write_text("\n".join(lines)[:-9])
    entries, note = read_metrics(path)
    assert ([e["step"] for e in entries], note) == ([2, 4], "metrics.jsonl: the last line is cut")
    path.write_text("\n".join([lines[0], "oops", lines[2]]) + "\n")
    assert ([e["step"] for e in read_metrics(path)[0]], read_metrics(path)[1]) == (
        [2],
        "metrics.jsonl: line 2 is illegible",
    )
    assert read_comparison(copied).arms[0].counts == {"finished": 3}  # its loss is in result.json
    assert "rmsnorm, seed 0: finished (metrics.jsonl: line 2 is illegible)" in terminal(read_comparison(copied))
    path.write_text('{"step": 1, "loss": NaN}\n')  # of an older version
    assert read_metrics(path) == ([{"step": 1, "loss": None}], "")
    path.unlink()
    assert read_metrics(path) == ([], "metrics.jsonl is missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has the format 2, this version of normsmith .* reads 1"),
        ({"seeds": [0, 0]}, "a seed or an arm is there twice"),
        ({"seeds": []}, "it has no runs"),
        ({"arms": ["rmsnorm", "rmsnrom"]}, "did you mean 'rmsnorm'"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"sweep": {"training.clip": ["1"]}}, "a sweep without a test split"),
    ],
)
def test_a_plan_of_another_version_or_edited_by_hand(change: dict[str, Any], message: str, copied: Path) -> None:
    path = copied / "study.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        read_comparison(copied)


def test_a_study_without_a_finished_run_has_no_table(base: Recipe, data: TextData, tmp_path: Path) -> None:
    study = make_study(tmp_path / "study", plan_of(base, data))
    with pytest.raises(InputError, match=r"study: no run has finished \(9 open\), so there is nothing to compare$"):
        read_comparison(study.folder)
    study.cells[0].folder.mkdir(parents=True)
    (study.cells[0].folder / ".normsmith").touch()
    record_failure(study.cells[0], "failed", "Traceback\n  boom\n\n")
    with pytest.raises(InputError, match=r"\(1 failed, 8 open\).*; rmsnorm, seed 0: boom$"):
        read_comparison(study.folder)


# Verdicts over rows


def fake(monkeypatch: pytest.MonkeyPatch, losses: dict[tuple[str, int], float | str], test: bool = False) -> None:
    """Give runs made-up results; what a folder holds is tested above."""

    def read(study: Study, cell: Any) -> Outcome:
        value = losses[(cell.point or cell.arm, cell.seed)]
        if isinstance(value, str):
            return Outcome(cell, value)  # pyright: ignore[reportArgumentType]
        return Outcome(cell, "finished", "", value, value + 10 if test else None, 100, 1.0)

    monkeypatch.setattr("normsmith.studies.comparison.read_cell", read)


def test_divergence_cannot_make_an_arm_better(
    monkeypatch: pytest.MonkeyPatch, base: Recipe, data: TextData, tmp_path: Path
) -> None:
    study = make_study(tmp_path / "study", plan_of(base, data, seeds=tuple(range(5))))
    better: dict[tuple[str, int], float | str] = {}
    for seed in range(5):
        better |= {(ARMS[0], seed): 3 + seed / 10, (ARMS[1], seed): 2 + seed / 10 + seed**2 / 1000}
        better |= {(ARMS[2], seed): 4 + seed / 10 + seed**2 / 1000}
    fake(monkeypatch, better)
    rows = read_comparison(study.folder).arms
    assert [row.verdict.outcome for row in rows[1:] if row.verdict] == ["better", "worse"]
    fake(monkeypatch, {**better, (ARMS[1], 3): "diverged", (ARMS[2], 4): "diverged"})
    verdicts = [row.verdict for row in read_comparison(study.folder).arms[1:] if row.verdict]
    assert [v.outcome for v in verdicts] == ["unknown", "worse"]
    assert verdicts[0].text.startswith("no verdict: 1 of its 5 runs diverged; the others: better by 0.9")
    assert verdicts[1].text.endswith("(1 of its 5 runs diverged)")
    fake(monkeypatch, {**better, (ARMS[0], 3): "diverged"})
    verdicts = [row.verdict for row in read_comparison(study.folder).arms[1:] if row.verdict]
    assert [v.outcome for v in verdicts] == ["better", "unknown"]


def test_a_single_seed_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch, base: Recipe, data: TextData, tmp_path: Path
) -> None:
    study = make_study(tmp_path / "study", plan_of(base, data, seeds=(4,)))
    fake(monkeypatch, {(arm, 4): float(i) for i, arm in enumerate(ARMS)})
    found = read_comparison(study.folder)
    assert [row.verdict.text for row in found.arms[1:] if row.verdict] == ["no verdict: one seed"] * 2
    assert [row.p_holm for row in found.arms] == [None] * 3
    write_tables(found, study.folder)
    assert (study.folder / "results.csv").read_text() == comma_separated(found)
    assert Comparison(**json.loads((study.folder / "results.json").read_text())) == found


def test_the_best_point_is_chosen_on_validation_and_reported_on_test(
    monkeypatch: pytest.MonkeyPatch, base: Recipe, data: TextData, tmp_path: Path
) -> None:
    sweep = {"training.clip": ("1", "2", "3")}
    shared = plan_study(base, ARMS[:2], [0, 1], sweep)
    study = make_study(tmp_path / "study", plan_of(shared, data, arms=ARMS[:2], seeds=(0, 1), sweep=sweep))
    assert len(study.cells) == 12
    assert study.cells[2].folder == study.folder / "rmsnorm/training.clip=2/0"
    assert study.cells[2].recipe.training.clip == 2
    one, two, three = ("training.clip=1", "training.clip=2", "training.clip=3")
    # The third has the lowest loss and a run that diverged: a setting that works for some seeds only is not the best.
    fake(
        monkeypatch,
        {(one, 0): 3.0, (one, 1): 3.0, (two, 0): 2.0, (two, 1): 2.5, (three, 0): 1.0, (three, 1): "diverged"},
        test=True,
    )
    found = read_comparison(study.folder)
    assert found.metric == "test loss"
    assert [(row.point, row.mean) for row in found.arms] == [(two, 12.25)] * 2
    assert "Best point" in markdown(found)
    assert "took no part in the choice" in markdown(found)


def test_names_are_escaped_in_markdown_and_quoted_in_csv(finished: Path) -> None:
    found = read_comparison(finished)
    odd = found.arms[0].to_dict() | {"arm": "a|b,<i>*"}
    strange = Comparison(**{**found.plain(), "arms": [odd, *found.plain()["arms"][1:]]})
    assert r"| a\|b,\<i\>\* |" in markdown(strange)
    assert comma_separated(strange).splitlines()[1].startswith('"a|b,<i>*",')
