"""What every schedule has, and the registry that makes it usable by name."""

from __future__ import annotations

from normsmith.config import Config
from normsmith.registry import Registry


class ScheduleConfig(Config):
    """Base of schedule configurations; `kind` is the registry name."""

    kind: str

    def span(self, steps: int) -> tuple[int, int]:
        """The optimiser steps between which it works in a run of `steps`; by default the whole run.

        Raises:
            InputError: it does not fit the run, as far as that can be said without the model.
        """
        return 0, steps


schedules: Registry[type[ScheduleConfig]] = Registry("schedule")
