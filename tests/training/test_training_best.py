"""The weights of the best validation: which those are, that they are what is judged and saved, and continued runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from normsmith.data import TaskData
from normsmith.errors import ConfigError, InputError
from normsmith.evaluation import ACCURACY, score
from normsmith.norms import create_norm
from normsmith.studies import Recipe
from normsmith.studies.library import find_recipe
from normsmith.studies.runner import Run, run_recipe
from normsmith.training import BestWeights, Reporter, TrainingConfig

# The rate rises to the end of the run and the decay with it, until it takes half of the weights at every step.
RISING = ["training.max_steps=60", "training.warmup=0.98", "training.learning_rate=0.012", "training.weight_decay=40"]
OFTEN = ["training.evaluate_every=5", "training.save_every=20", "evaluation.windows=100", "training.log_every=5"]


# What draws random numbers in training: a gate, and dropout.
NOISE = ["norm=autonorm", "model.dropout=0.1"]


def rising(*changes: str) -> Recipe:
    return find_recipe("digits-vit", [*RISING, *OFTEN, *changes])


def run(recipe: Recipe, folder: Path, **options: Any) -> Run:
    return run_recipe(recipe, folder, Reporter(quiet=True), **options)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


class Scripted:
    """A run whose scores are given: (step, score), and weights that hold the number of the step."""

    def __init__(self, scores: dict[int, float], start: int = 0) -> None:
        self.model, self.scores, self.calls = create_norm("autonorm", 8), scores, 0
        self.best = BestWeights(self.model, self._score, start)
        state = type("State", (), {"global_step": 0, "is_world_process_zero": True})()
        self.best.on_train_begin(None, state, None)  # pyright: ignore[reportArgumentType]
        for step in scores:
            state.global_step = step
            self._fill(step)
            self.best.on_evaluate(None, state, None)  # pyright: ignore[reportArgumentType]
        self.best.on_train_end(None, state, None)  # pyright: ignore[reportArgumentType]

    def _score(self) -> float:
        self.calls += 1
        return self.scores[self.step_now]

    @torch.no_grad()
    def _fill(self, step: int) -> None:
        self.step_now = step
        for value in (*self.model.parameters(), *self.model.buffers()):
            value.fill_(step)


@pytest.mark.parametrize(
    ("scores", "start", "expected"),
    [
        ({2: 3.0, 4: 1.0, 6: 2.0}, 0, 4),
        ({2: 1.0, 4: 1.0}, 0, 2),
        ({2: math.nan, 4: 5.0, 6: math.nan}, 0, 4),
        ({2: 0.0, 4: 2.0, 6: 1.0, 8: 3.0}, 4, 6),
        ({2: -0.2, 4: -0.9, 6: -0.5}, 0, 4),
    ],
)
def test_the_lowest_score_wins_and_buffers_come_with_it(scores: dict[int, float], start: int, expected: int) -> None:
    run = Scripted(scores, start)
    assert run.calls == sum(step >= start for step in scores), "the end of the run is not scored twice"
    assert run.best.apply_() == expected
    assert all(bool((v == expected).all()) for v in (*run.model.parameters(), *run.model.buffers()))


def test_without_a_score_the_weights_stay() -> None:
    run = Scripted({2: math.nan, 4: math.inf})
    assert run.best.apply_() is None
    assert all(bool((v == 4).all()) for v in run.model.parameters())


def test_the_best_weights_are_judged_and_saved(tmp_path: Path) -> None:
    last = run(rising(), tmp_path / "last")
    best = run(rising("training.keep=best"), tmp_path / "best")
    kept = result(tmp_path / "best")["kept_step"]
    assert kept % 5 == 0
    assert 0 < kept < 50
    assert "kept_step" not in result(tmp_path / "last")
    assert best.validation_metric is not None
    assert last.validation_metric is not None
    assert best.validation_metric > last.validation_metric + 0.1
    again = type(best.model).from_pretrained(tmp_path / "best")
    assert isinstance(best.data, TaskData)
    assert score(again, best.validation, ACCURACY).metric == pytest.approx(best.validation_metric, abs=1e-6)
    short = run(rising("training.keep=best", "training.evaluate_every=1000"), tmp_path / "end")
    assert (result(tmp_path / "end")["kept_step"], short.test_metric) == (60, last.test_metric)


def test_looking_at_the_validation_split_does_not_change_the_training(tmp_path: Path) -> None:
    noisy = [*NOISE, "training.max_steps=12", "training.evaluate_every=3"]
    last, best = (run(rising(*noisy, f"training.keep={keep}"), tmp_path / keep) for keep in ("last", "best"))
    assert best.history == last.history


def test_a_continued_run_remembers_the_best_weights(tmp_path: Path) -> None:
    recipe = rising("training.keep=best")
    run(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for name in ("result.json", "model.safetensors"):
        (tmp_path / "cut" / name).unlink()
    # What an interruption leaves between transformers' last file and ours; the checkpoint before it is whole.
    (tmp_path / "cut/checkpoints/checkpoint-60/best_weights.pt").unlink()
    run(recipe, tmp_path / "cut", resume=True)
    whole, cut = (result(tmp_path / name) for name in ("whole", "cut"))
    assert cut["kept_step"] == whole["kept_step"] <= 40, "the best weights lie in the part that was not repeated"
    assert cut["test_loss"] == whole["test_loss"]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert files[0] == files[1]
    state, arguments = type("S", (), {"global_step": 40})(), type("A", (), {"output_dir": str(tmp_path)})()
    best: Any = BestWeights(torch.nn.Linear(1, 1), lambda: 0.0)
    with pytest.raises(InputError, match=r"best_weights.pt: is missing, so the best weights so far are not known"):
        best.on_train_begin(arguments, state, None)


@pytest.mark.parametrize(
    ("schedule", "norm", "earliest"), [("taper", "layernorm", 60), ("gate_freeze", "autonorm", 30)]
)
def test_weights_of_an_unfinished_schedule_do_not_count(
    schedule: str, norm: str, earliest: int, tmp_path: Path
) -> None:
    freeze = ["schedule.freeze=0.5", "schedule.rule=always"] if schedule == "gate_freeze" else []
    changes = [f"norm.kind={norm}", f"schedule.kind={schedule}", *freeze]
    done = run(rising("training.keep=best", *changes), tmp_path / "run")
    assert result(tmp_path / "run")["kept_step"] >= earliest
    assert all(float(value) == 1 for name, value in done.model.named_buffers() if name.endswith("frozen"))
    assert all(float(value) == 0 for name, value in done.model.named_buffers() if name.endswith("gate"))


def test_the_best_of_one_or_of_an_average_is_refused() -> None:
    with pytest.raises(ConfigError, match="write evaluate_every too, or keep: last"):
        TrainingConfig(keep="best")
    with pytest.raises(ConfigError, match="leave one of them out"):
        TrainingConfig(keep="best", evaluate_every=5, weight_average=0.9)
