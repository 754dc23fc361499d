"""What changes norms during training: schedules as pure functions, controllers that apply them."""

from normsmith.schedules.controller import Controller, TaperController, close_controllers
from normsmith.schedules.taper import TaperConfig, schedules

__all__ = ["Controller", "TaperConfig", "TaperController", "close_controllers", "schedules"]
