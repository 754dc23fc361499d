"""An exponential moving average of the weights, which evaluates better than the last weights of a noisy run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from normsmith.errors import InputError
from normsmith.ops.statistics import widen
from normsmith.training.callback import normalize_weights_


def save_beside(value: Any, path: Path) -> None:
    """Save a tensor or a structure of tensors so that `path` is whole or not there."""
    part = path.with_name(f"{path.name}.part")
    torch.save(value, part)
    part.replace(path)


class WeightAverage(TrainerCallback):
    """w̄ ← d·w̄ + (1 − d)·w after every optimiser step, with d = min(decay, (1 + t)/(10 + t)) at step t.

    The growing d lets a short run forget its initial weights too. Every checkpoint holds the average. `apply_()` puts
    it into the model; buffers (the gates of schedules) are the model's own. Add it after what changes the weights at a
    step's end (`NormsmithCallback`).
    """

    file = "weight_average.pt"
    """What it writes into a checkpoint; one without it was cut short."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.average: list[Tensor] = []

    def _weights(self) -> list[Tensor]:
        return [widen(parameter.detach()) for parameter in self.model.parameters()]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with the weights, or with the average of the checkpoint that is continued."""
        self.average = [weight.clone() for weight in self._weights()]  # of half precision in float32, to move at all
        if not state.global_step:
            return
        path = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / self.file
        if not path.is_file():
            raise InputError(f"{path}: is missing, so the average of the weights cannot be continued; start anew")
        loaded = cast("list[Tensor]", torch.load(path, map_location="cpu", weights_only=True))
        for mine, theirs in zip(self.average, loaded, strict=True):
            mine.copy_(theirs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Average once more."""
        step = state.global_step
        decay = min(self.decay, (1 + step) / (10 + step))
        update = cast("Callable[..., None]", get_ema_multi_avg_fn(decay))
        update(self.average, self._weights(), step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the average with the checkpoint."""
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            save_beside(self.average, folder / self.file)

    @torch.no_grad()
    def apply_(self) -> None:
        """Give the model the averaged weights. In place.

        A mean of unit vectors is shorter than one, so weights of unit length (`ngpt`) are made so again.
        """
        for weight, average in zip(self.model.parameters(), self.average, strict=True):
            weight.copy_(average)
        normalize_weights_(self.model)
