"""A model may move to its device after the schedule was made, as with a Trainer: the schedule's numbers follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import normsmith as ns
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.schedules import Controller, SequentialConfig
from normsmith.schedules.overflow import Overflow

IDS = torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(0))


def small(norm: str) -> NormsmithForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return NormsmithForCausalLM(preset_config("gpt", **sizes, norm=norm)).train()


def numbers(controller: Controller) -> dict[str, Tensor]:
    found = {name: value for name, value in vars(controller).items() if isinstance(value, Tensor)}
    overflow = getattr(controller, "overflow", None)
    return {**found, "overflow": overflow.steps} if isinstance(overflow, Overflow) else found


@pytest.mark.parametrize(
    ("norm", "schedule"),
    [
        ("autonorm", lambda m: ns.freeze_gates_(m, {"freeze": 0.5}, steps=20)),
        ("layernorm", lambda m: ns.taper_(m, {"warmup": 0.5}, steps=20)),
        ("layernorm", lambda m: ns.remove_one_by_one_(m, SequentialConfig(start_step=9, gaps=(1, 1, 1)), steps=40)),
    ],
)
def test_what_a_schedule_knows_follows_the_model(norm: str, schedule: Callable[[Any], Controller]) -> None:
    model = small(norm)
    controller = schedule(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    controller.step()
    assert numbers(controller)
    model.to("meta")  # has no values, so a step that waited for one would fail as well
    loss = model(input_ids=IDS.to("meta"), labels=IDS.to("meta")).loss + controller.auxiliary_loss()
    loss.backward()
    controller.step()
    assert {name: value.device.type for name, value in numbers(controller).items()} == dict.fromkeys(
        numbers(controller), "meta"
    )
