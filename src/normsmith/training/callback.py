"""A callback that lets anybody's `transformers.Trainer` run a schedule."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from normsmith.errors import InputError
from normsmith.schedules import Controller
from normsmith.training.optim import untrained_names


class NormsmithCallback(TrainerCallback, ExportableState):  # pyright: ignore[reportUnsafeMultipleInheritance]
    """Steps the controller once per optimiser step, logs its progress, and keeps its state in every checkpoint.

    Models whose weights have unit length (`ngpt`) get it back after every optimiser step, with or without a controller.
    In a plain `transformers.Trainer` the loss must add `controller.auxiliary_loss()` itself; `normsmith.Trainer` does.

    >>> transformers.Trainer(model, args, callbacks=[NormsmithCallback(controller)], ...)
    """

    def __init__(self, controller: Controller | None = None) -> None:
        self.controller = controller

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the optimiser, tell the schedule how long the run is; continue it where a checkpoint stopped."""
        _check_optimizer(kwargs.get("optimizer"), kwargs.get("model"))
        if self.controller is None:
            if hasattr(self, "controller_state"):
                raise InputError(
                    "restore_callback_states_from_checkpoint replaces the callback and loses its controller; leave it "
                    "False: the schedule continues where the checkpoint stopped without it"
                )
            return
        if self.controller.steps is None:
            self.controller.steps = state.max_steps
        if self.controller.length() != state.max_steps:
            raise InputError(
                f"the schedule was made for {self.controller.steps} optimiser steps, this run has {state.max_steps}; "
                "leave steps out where the controller is made and the Trainer fills it in"
            )
        stored = cast("dict[str, Any]", state.stateful_callbacks or {})
        saved = stored.get(type(self).__name__)
        if not state.global_step:
            return
        if saved is None or "controller_state" not in saved["attributes"]:
            raise InputError(
                f"the checkpoint of step {state.global_step} holds no schedule, so it cannot be continued with one; "
                "start the run anew, or resume it without a controller"
            )
        self.controller.load_state_dict(saved["attributes"]["controller_state"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One optimiser step is complete."""
        if self.controller is not None:
            self.controller.step()
        normalize_weights_(kwargs.get("model"))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the schedule's numbers to what loggers see."""
        if self.controller is not None and logs is not None:
            for name, value in self.controller.progress().items():
                logs.setdefault(name, value)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        attributes = {} if self.controller is None else {"controller_state": self.controller.state_dict()}
        return {"args": {}, "attributes": attributes}


def normalize_weights_(model: nn.Module | None) -> None:
    """Call `normalize_weights_()` of the first module that has one: the model itself, inside whatever wraps it."""
    modules = () if model is None else model.modules()
    found: Any = next((m for m in modules if callable(getattr(m, "normalize_weights_", None))), None)
    if found is not None:
        found.normalize_weights_()


def _check_optimizer(optimizer: Any, model: Any) -> None:
    if optimizer is None or model is None or not (missing := untrained_names(optimizer, model)):
        return
    names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    raise InputError(
        f"the optimizer does not train {names}: it was made before the model was changed; call "
        "rebind_optimizer_(optimizer, model), or make the optimizer after the swap"
    )
