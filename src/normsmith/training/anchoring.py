"""A callback that logs at every evaluation how large logits and stream are."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from normsmith.diagnostics.anchoring import Scales


class AnchoringCallback(TrainerCallback):
    """Adds `logit_norm`, `stream_scale_mean` and `stream_scale_std` to what an evaluation during training logs.

    They are read off the forward passes that the evaluation makes anyway, over the parts of all processes.

    >>> normsmith.Trainer(model, args, callbacks=[AnchoringCallback()], eval_dataset=..., ...)
    """

    def __init__(self) -> None:
        self._scales: Scales | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch the model's evaluations."""
        model = kwargs["model"]
        self._scales = Scales(model, when=lambda: not model.training)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget what others looked at since the last evaluation, as a callback that scores the weights."""
        if self._scales is not None:
            self._scales.discard()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the numbers to those of the evaluation, for loggers and for the history."""
        if self._scales is None or logs is None or "eval_loss" not in logs:
            return
        found = self._scales.drain(shared=args.device)
        logs |= found
        state.log_history[-1] |= found

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching."""
        if self._scales is not None:
            self._scales.close()
            self._scales = None
