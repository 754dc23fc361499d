"""A callback that logs at every evaluation how undecided the gate of each site is."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from normsmith.schedules import GateController


class GateSitesCallback(TrainerCallback):
    """Adds `site_entropy/SITE`, in nats, to what an evaluation during training logs.

    The controller logs the mean over the sites far more often; a number per site each time would be most of the log.

    Args:
        controller: of the gates, as `freeze_gates_` returns it.
    """

    def __init__(self, controller: GateController) -> None:
        self.controller = controller

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the numbers to those of the evaluation, for loggers and for the history."""
        if logs is None or "eval_loss" not in logs:
            return
        gates = self.controller.gates()
        found = {f"site_entropy/{gate.site}": gate.entropy for gate in gates if not math.isnan(gate.entropy)}
        logs |= found
        state.log_history[-1] |= found
