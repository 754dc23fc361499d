"""A model may move to its device after the schedule was made, as with a Trainer: the schedule's numbers follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import normsmith as ns
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.schedules import Controller, SequentialConfig
from normsmith.schedules.overflow import Overflow

IDS = torch.randint(60, (2, 8), generator=torch.Generator().manual_seed(0))


class NoCopies(TorchDispatchMode):
    """Fails where a step takes numbers from the CPU to the device, which would be waited for on an accelerator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.device.type == "cpu"]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_meta]
        assert not (given and made), f"{func} takes {tuple(given[0].shape)} from the CPU"
        return result


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
        ("layernorm", lambda m: ns.taper_(m, {"warmup": 0.5, "calibration": "batch"}, steps=20)),
        ("layernorm", lambda m: ns.remove_one_by_one_(m, SequentialConfig(start_step=9, gaps=(1, 1, 1)), steps=40)),
    ],
)
def test_what_a_schedule_knows_follows_the_model(norm: str, schedule: Callable[[Any], Controller]) -> None:
    model = small(norm)
    controller = schedule(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    controller.step()
    assert numbers(controller)
    model.config.use_cache = False
    model.to("meta")  # has no values, so a step that waited for one would fail as well
    ids = IDS.to("meta")
    (model(input_ids=ids, labels=ids).loss + controller.auxiliary_loss()).backward()
    controller.step()  # brings the numbers over; from then on nothing else goes to the device
    with NoCopies():
        controller.step()
        model(input_ids=ids, labels=ids)
        controller.step()
    assert {name: value.device.type for name, value in numbers(controller).items()} == dict.fromkeys(
        numbers(controller), "meta"
    )
