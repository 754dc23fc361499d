"""Put any registered schedule on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from normsmith.errors import InputError
from normsmith.schedules import Controller, ScheduleConfig
from normsmith.surgery.gates import freeze_gates_
from normsmith.surgery.one_by_one import remove_one_by_one_
from normsmith.surgery.taper import taper_

_MAKERS: dict[str, Callable[..., Controller]] = {
    "gate_freeze": freeze_gates_,
    "sequential": remove_one_by_one_,
    "taper": taper_,
}


def schedule_(model: nn.Module, config: ScheduleConfig, *, steps: int | None = None) -> Controller:
    """Change the model as the schedule asks, in place, and return the controller: `taper_`, `freeze_gates_` or another.

    Raises:
        InputError: what the schedule's own function raises, or nothing carries out a schedule of this kind.
    """
    if config.kind not in _MAKERS:
        raise InputError(f"no function carries out the schedule {config.kind!r}; known: {', '.join(_MAKERS)}")
    maker: Any = _MAKERS[config.kind]
    return maker(model, config, steps=steps)
