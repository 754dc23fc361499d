"""The `training` part of a recipe, and its translation into transformers' arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from normsmith.config import Config
from normsmith.errors import InputError, UnknownNameError


class TrainingConfig(Config):
    """How a model is trained: AdamW, linear warm-up, cosine decay.

    Args:
        max_steps: optimiser steps.
        batch_size: sequences per step and process, before accumulation.
        gradient_accumulation: micro-batches per optimiser step.
        learning_rate: peak of the schedule.
        min_learning_rate_ratio: its end as a fraction of the peak.
        warmup: fraction of the steps with rising learning rate.
        weight_decay: for matrices only; gains, gates and biases are never decayed.
        beta1: of AdamW.
        beta2: of AdamW.
        clip: largest gradient norm, 0 for none.
        label_smoothing: share of every training label that is spread over all classes (images and sentences only).
        weight_average: decay of a moving average of the weights, which is what is evaluated and saved in the end; 0
            for none (see `WeightAverage`).
        keep: which weights are evaluated and saved in the end: the `last`, or the `best` of all validations that
            `evaluate_every` asks for and the end, by the task's metric (text: the loss); see `BestWeights`.
        bf16: bfloat16 autocast; parameters and residual stream stay float32.
        compile: `torch.compile` the model.
        activation_checkpointing: recompute activations in the backward pass.
        log_every: steps between logged losses.
        evaluate_every: steps between validation losses, 0 for the end only.
        save_every: steps between checkpoints, 0 for none.
        report_to: transformers' integrations that receive the logs, for example `tensorboard`.
    """

    max_steps: int = Field(default=300, ge=1)
    batch_size: int = Field(default=16, ge=1)
    gradient_accumulation: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    min_learning_rate_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup: float = Field(default=0.05, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    clip: float = Field(default=1.0, ge=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    weight_average: float = Field(default=0.0, ge=0, lt=1)
    keep: Literal["last", "best"] = "last"
    bf16: bool = False
    compile: bool = False
    activation_checkpointing: bool = False
    log_every: int = Field(default=10, ge=1)
    evaluate_every: int = Field(default=0, ge=0)
    save_every: int = Field(default=0, ge=0)
    report_to: tuple[str, ...] = ()

    def check(self) -> None:
        """Names in `report_to` must be integrations of transformers; the best of several weights needs several."""
        if self.keep == "best" and not self.evaluate_every:
            raise ValueError("keep='best' chooses among the validations: write evaluate_every too, or keep: last")
        if self.keep == "best" and self.weight_average:
            raise ValueError("keep='best' and weight_average both say which weights are kept; leave one of them out")
        for name in self.report_to:
            if name not in INTEGRATION_TO_CALLBACK:
                raise UnknownNameError("report_to", name, INTEGRATION_TO_CALLBACK)

    @property
    def sequences(self) -> int:
        """Sequences one process reads in the whole run; the data set must hold as many for each."""
        return self.max_steps * self.batch_size * self.gradient_accumulation

    def arguments(self, output: Path, seed: int) -> TrainingArguments:
        """The same settings as transformers' arguments; `output` receives the checkpoints.

        Raises:
            InputError: an integration named in `report_to` is not installed.
        """
        for name in self.report_to:
            if name not in get_available_reporting_integrations():
                raise InputError(f"report_to {name!r}: is not installed here; install it, or write report_to: []")
        device = torch.accelerator.is_available()
        options: dict[str, Any] = {
            "output_dir": str(output),
            "max_steps": self.max_steps,
            "per_device_train_batch_size": self.batch_size,
            "per_device_eval_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation,
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": self.min_learning_rate_ratio},
            "warmup_steps": round(self.warmup * self.max_steps),
            "weight_decay": self.weight_decay,
            "adam_beta1": self.beta1,
            "adam_beta2": self.beta2,
            "max_grad_norm": self.clip,
            "bf16": self.bf16,
            "torch_compile": self.compile,
            "activation_checkpointing": self.activation_checkpointing,
            "logging_steps": self.log_every,
            "eval_strategy": "steps" if self.evaluate_every else "no",
            "save_strategy": "steps" if self.save_every else "no",
            "save_total_limit": 2,
            "report_to": list(self.report_to),
            "seed": seed,
            "use_cpu": not device,
            "disable_tqdm": True,
            "dataloader_pin_memory": device,
            "accelerator_config": {"non_blocking": device},  # pinned batches are copied while the device computes
            "remove_unused_columns": False,
        }
        if self.evaluate_every:
            options["eval_steps"] = self.evaluate_every
        if self.save_every:
            options["save_steps"] = self.save_every
        arguments = TrainingArguments(**options)
        # Several GPUs are torchrun's to use. transformers would else copy the model to all of them in every step
        # (DataParallel), and what norms record for their schedule would be lost with the copies.
        arguments._n_gpu = min(arguments.n_gpu, 1)  # pyright: ignore[reportPrivateUsage]
        return arguments
