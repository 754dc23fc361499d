"""A stream that outgrows float16 while the norms go: the site and the step are named, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import normsmith as ns
from normsmith.errors import DivergedError
from normsmith.training import Trainer
from tests.tiny import tiny
from tests.training.runs import TAPER, At, arguments, windows

IDS = torch.randint(90, (2, 16), generator=torch.Generator().manual_seed(1))


def half() -> Any:
    """A float16 model of two blocks; `grow` makes what its first MLP adds to the stream too large."""
    return tiny("llama", vocab_size=256).half().train()


def grow(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.sign_().mul_(6e4)
        model.model.layers[0].mlp.up_proj.weight.mul_(30)


def names(model: Any) -> list[str]:
    return [site.name for site in ns.find_norms(model) if site.role == "pre"]


@pytest.mark.parametrize("method", ["taper", "fakeln"])
def test_the_trainer_names_site_and_step(method: str, tmp_path: Path) -> None:
    model = half()
    after = names(model)[2]  # of the second block's attention: the first to read what the first MLP wrote
    if method == "taper":
        controller: Any = ns.taper_(model, TAPER.model_copy(update={"scale_loss": 0.0}))
    else:
        config = ns.SequentialConfig(start_step=6, gaps=(0, 0, 0), waits=(1, 1), scale_loss=0)
        controller = ns.remove_one_by_one_(model, config)
    # Not AdamW, whose eps is 0 in float16.
    optimizers = (torch.optim.SGD(model.parameters(), lr=1e-5), None)
    callbacks = [At(5, lambda: grow(model))]
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=windows(),
        controller=controller,
        callbacks=callbacks,
        optimizers=optimizers,
    )
    with pytest.raises(DivergedError) as caught:
        trainer.train()
    message = str(caught.value)
    assert f"the input of {after} was the first that is not finite, at step 5" in message
    assert "float16 ends at 65504" in message
    assert "bfloat16" in message
    assert ("mean gate now" if method == "taper" else "norms removed by now") in message
    assert "no checkpoint was written before" in message


def test_the_calibration_names_it_too() -> None:
    model = half()
    after = names(model)[2]
    controller = ns.taper_(model, ns.TaperConfig(warmup=0.4, scale_loss=0), steps=10)
    for step in range(3):
        if step == 1:
            grow(model)
        model(input_ids=IDS)
        controller.step()
    model(input_ids=IDS)
    with pytest.raises(
        DivergedError, match=f"cannot be calibrated at step 4: the input of {after} .* at step 2 .*bfloat16"
    ):
        controller.step()


def test_a_finite_run_has_no_diagnosis() -> None:
    for change in (ns.taper_, ns.remove_one_by_one_):
        model = half()
        controller = change(model, steps=40)
        model(input_ids=IDS)
        controller.step()
        assert controller.diagnosis() == ""
