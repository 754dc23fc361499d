"""A run that was interrupted and resumed is the run that was not, to the bit; another run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM
from normsmith.schedules import Controller, TaperConfig
from normsmith.surgery import taper_
from normsmith.training import Trainer
from tests.training.runs import STEPS, TAPER, At, arguments, small, windows


def build(
    folder: Path, seed: int = 0, config: TaperConfig = TAPER, callbacks: Any = None, **changes: Any
) -> tuple[NormsmithForCausalLM, Controller, Trainer]:
    model = small("gpt", seed=seed)
    controller = taper_(model, config)
    args = arguments(folder, **{"save_every": 2, "gradient_accumulation": 2, **changes})
    data = windows(24)  # the run reads 64: epochs end in the middle of it
    return model, controller, Trainer(model, args, train_dataset=data, controller=controller, callbacks=callbacks)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[NormsmithForCausalLM, Controller, Trainer]:
    built = build(tmp_path_factory.mktemp("whole"), save_every=0)
    built[2].train()
    return built


@pytest.mark.parametrize("stop", [2, 4])  # in the warm-up, and after the calibration at step 3
def test_resumed_run_is_bit_equal_to_the_whole_one(stop: int, whole: Any, tmp_path: Path) -> None:
    model, controller, trainer = whole
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "cut", callbacks=[At(stop + 2, interrupt)])[2].train()
    again, second, resumed = build(tmp_path / "cut", seed=9)
    assert not torch.equal(again.lm_head.weight, small("gpt").lm_head.weight), "a fresh model, other weights"
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{stop}"))
    one, other = model.state_dict(), again.state_dict()
    assert one.keys() == other.keys()
    assert [n for n in one if not torch.equal(one[n], other[n])] == []
    assert second.state_dict() == controller.state_dict()
    assert second.completed == STEPS
    numbers = [
        [(e["step"], e["loss"], e["auxiliary_loss"], e["gate"], e["grad_norm"]) for e in t.state.log_history[:STEPS]]
        for t in (trainer, resumed)
    ]
    assert numbers[0] == numbers[1]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, callbacks=[At(5, interrupt)])[2].train()
    return str(tmp_path / "checkpoint-4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": TaperConfig(warmup=0.4, momentum=0.2, scale_loss=1.0, shape="linear")}, "another shape: resume"),
        ({"config": TaperConfig(warmup=0.3, momentum=0.1, scale_loss=1.0)}, "another warmup, momentum: resume"),
        ({"max_steps": 10}, "a run of 8 steps, this run has 10: resume with the same number"),
    ],
)
def test_another_schedule_or_length_is_refused(
    changes: dict[str, Any], message: str, checkpoint: str, tmp_path: Path
) -> None:
    _, controller, trainer = build(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert controller.completed == 0


def test_a_checkpoint_without_a_schedule_does_not_start_one_in_the_middle(tmp_path: Path) -> None:
    # Built with tapered norms, so that the weights fit; only the controller was not there.
    args = arguments(tmp_path, save_every=4)
    Trainer(small(norm="tapered_rmsnorm"), args, train_dataset=windows()).train()
    model = small(norm="tapered_rmsnorm")
    trainer = Trainer(model, args, train_dataset=windows(), controller=taper_(model, TAPER))
    with pytest.raises(InputError, match="the checkpoint of step 4 holds no schedule"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_restored_callback_does_not_lose_its_controller_silently(checkpoint: str, tmp_path: Path) -> None:
    trainer = build(tmp_path)[2]
    trainer.args.restore_callback_states_from_checkpoint = True
    with pytest.raises(InputError, match="restore_callback_states_from_checkpoint"):
        trainer.train(resume_from_checkpoint=checkpoint)


def test_the_length_of_the_run_reaches_the_schedule(tmp_path: Path) -> None:
    _, controller, trainer = build(tmp_path, save_every=0)
    assert controller.steps is None
    trainer.train()
    assert controller.steps == controller.completed == STEPS
    too_short = build(tmp_path, max_steps=1, save_every=0)[2]
    with pytest.raises(InputError, match="a run of 1 steps is too short to taper"):
        too_short.train()
