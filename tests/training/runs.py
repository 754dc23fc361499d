"""What the training tests share: a small model, real text, and arguments for a run of a few steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from normsmith.data import PackedWindows
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig
from normsmith.training import TrainingConfig
from tests.conftest import scramble

TEXT = np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8)  # real text; a byte is a token
TAPER = TaperConfig(warmup=0.4, momentum=0.2, scale_loss=1.0)  # of 8 steps: calibrated at 3, the gate is 0 at 8
STEPS = 8


def small(preset: str = "llama", seed: int = 0, **changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.1}
    torch.manual_seed(seed)
    model = NormsmithForCausalLM(preset_config(preset, **{**sizes, **changes}))
    scramble(model)
    return model


def windows(items: int = 64, seed: int | None = 5) -> PackedWindows:
    return PackedWindows(TEXT, 16, seed, items)


def arguments(folder: Path, seed: int = 1, **changes: Any) -> TrainingArguments:
    settings = {"max_steps": STEPS, "batch_size": 4, "learning_rate": 1e-2, "warmup": 0.25, "log_every": 1}
    return TrainingConfig(**{**settings, **changes}).arguments(folder, seed)  # pyright: ignore[reportArgumentType]


def tapered(model: nn.Module) -> list[TaperedNorm]:
    return [m for m in model.modules() if isinstance(m, TaperedNorm)]


def logged(trainer: Any, name: str) -> dict[int, float]:
    """Step → value of everything logged under `name`."""
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


class At(TrainerCallback):
    """Does something right before the optimiser step of a given number, counted from 1."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.action()
