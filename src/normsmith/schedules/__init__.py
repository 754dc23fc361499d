"""What changes norms during training: schedules as pure functions, controllers that apply them."""

from normsmith.schedules.base import ScheduleConfig, schedules
from normsmith.schedules.controller import Controller, TaperController, close_controllers
from normsmith.schedules.gate_freeze import GateFreezeConfig
from normsmith.schedules.gates import GateController, GateState
from normsmith.schedules.one_by_one import OneByOneController
from normsmith.schedules.sequential import Removal, SequentialConfig
from normsmith.schedules.taper import TaperConfig

__all__ = [
    "Controller",
    "GateController",
    "GateFreezeConfig",
    "GateState",
    "OneByOneController",
    "Removal",
    "ScheduleConfig",
    "SequentialConfig",
    "TaperConfig",
    "TaperController",
    "close_controllers",
    "schedules",
]
