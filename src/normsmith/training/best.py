"""The weights of the best evaluation of a run, for runs that overfit before they end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from normsmith.errors import InputError
from normsmith.training.average import save_beside


class BestWeights(TrainerCallback):
    """Remember parameters and buffers of the evaluation with the lowest score, the earliest where several are equal.

    Evaluations before step `start` do not count, and the end of the run counts as one. Every checkpoint holds what is
    remembered. `apply_()` puts it into the model.

    Args:
        model: what is trained, as it is in this process.
        score: of the model as it stands, lower is better; NaN is never the best. Every rank calls it and must get the
            same number.
        start: for a run with a schedule, the step at which that is complete.
    """

    file = "best_weights.pt"
    """What it writes into a checkpoint; one without it was cut short."""

    def __init__(self, model: nn.Module, score: Callable[[], float], start: int = 0) -> None:
        self.model, self.score, self.start = model, score, start
        self.step, self.lowest, self.scored = 0, math.inf, -1
        self.weights: dict[str, Tensor] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with nothing, or with what the checkpoint that is continued remembers."""
        if not state.global_step:
            return
        path = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / self.file
        if not path.is_file():
            raise InputError(f"{path}: is missing, so the best weights so far are not known; start anew")
        loaded = cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True))
        self.step, self.lowest, self.weights = loaded["step"], loaded["lowest"], loaded["weights"]

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remember the weights if they are the best so far."""
        step = state.global_step
        if step < self.start or step == self.scored:
            return
        here = next(self.model.parameters()).device
        with torch.random.fork_rng([here] if here.type == "cuda" else []):  # looking changes no noise of later steps
            self.scored, score = step, self.score()
        if score < self.lowest:
            self.step, self.lowest = step, score
            self.weights = {name: value.detach().to("cpu", copy=True) for name, value in self._named().items()}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep what is remembered with the checkpoint."""
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            remembered = {"step": self.step, "lowest": self.lowest, "weights": self.weights}
            save_beside(remembered, folder / self.file)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last weights may be the best ones."""
        self.on_evaluate(args, state, control)

    @torch.no_grad()
    def apply_(self) -> int | None:
        """Give the model the best weights and say of which step they are; None if no score was a number. In place."""
        if not self.weights:
            return None
        for name, value in self._named().items():
            value.copy_(self.weights[name])
        return self.step

    def _named(self) -> dict[str, Tensor]:
        # Not the state dict, which leaves out buffers that decide what the model computes, as a schedule's gate.
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
