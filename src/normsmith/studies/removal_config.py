"""Settings for removing a pretrained model's norms, and presets of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from normsmith.config import Config
from normsmith.data import DataConfig
from normsmith.schedules import SequentialConfig, TaperConfig
from normsmith.schedules.sequential import PRESETS
from normsmith.training import TrainingConfig

Method = Literal["taper", "fakeln"]
METHODS: tuple[Method, ...] = ("taper", "fakeln")


class RemovalConfig(Config):
    """How the norms of a pretrained model are removed.

    Args:
        method: `taper` (TaperNorm) or `fakeln` (FakeLN).
        data: text to fine-tune and evaluate on, as in a recipe; the tokenizer is the model's.
        training: how the model is fine-tuned.
        taper: the schedule of the method `taper`.
        sequential: the schedule of the method `fakeln`.
        order: how the norms taper: `together`, or `audit`: one site after the other, the one that a fixed scale
            explains best first.
        taper_learning_rate: peak learning rate while the norms taper; default that of `training`. Removing norms moves
            the weights further than fine-tuning does, and a teacher keeps them from overfitting, so it may be higher.
        control: also fine-tune the unchanged model with the same budget, so that what the data did is told apart from
            what the taper did.
        distill: weight α of the distillation from the fine-tuned control while the norms taper: the training loss is
            (1 − α)·cross-entropy + α·KL(control ‖ model). Needs `control`; 0 for none.
        windows: validation windows to evaluate on, 0 for all.
        decode_rounds: measured rounds of the decoding benchmark.
        seed: of the data order.
    """

    method: Method = "taper"
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    taper: TaperConfig = TaperConfig()
    sequential: SequentialConfig = SequentialConfig()
    order: Literal["together", "audit"] = "together"
    control: bool = True
    distill: float = Field(default=1.0, ge=0, le=1)
    taper_learning_rate: float | None = Field(default=None, gt=0)
    windows: int = Field(default=0, ge=0)
    decode_rounds: int = Field(default=15, ge=1)
    seed: int = Field(default=0, ge=0)

    def check(self) -> None:
        """The audit's order is one of the taper."""
        if self.method == "fakeln" and self.order != "together":
            raise ValueError(f"order={self.order!r} belongs to the method taper; fakeln has an order of its own")

    @property
    def placement(self) -> str:
        """Which norms go."""
        return self.taper.placement if self.method == "taper" else self.sequential.placement


# GPT-2 by number of layers (TaperNorm, arXiv 2602.10408, table 6, with the learning rates of FakeLN, arXiv 2507.02559):
# steps, end of the learning rate's warm-up, start and end of the taper, peak and last learning rate, λ.
_GPT2 = {
    12: (300, 25, 25, 100, 6e-4, 3e-4, 0.1),
    24: (500, 10, 20, 200, 6e-4, 3e-4, 0.1),
    36: (600, 30, 30, 500, 3e-4, 4e-5, 0.1),
    48: (800, 20, 50, 700, 1e-4, 2e-5, 0.01),
}


def preset(model: Any, steps: int | None = None, method: Method = "taper") -> RemovalConfig:
    """The settings for this model: the paper's for GPT-2 S, M, L and XL, a sensible default for any other.

    With `steps`, the fractions of the run stay and its length changes. The default takes 400 steps: warm-up over the
    first 5 %, the taper until 80 % (FakeLN: the last removal at 60 %), the rest without norms.
    """
    config = getattr(model, "config", None)
    layers = getattr(config, "n_layer", 0) if getattr(config, "model_type", "") == "gpt2" else 0
    if method == "fakeln" and layers in PRESETS:
        return _fake_gpt2(layers, steps)
    row = _GPT2.get(layers)
    total, warm, start, end, peak, last, scale = row or (400, 20, 20, 320, 5e-4, 0.0, 0.1)
    training = TrainingConfig(
        max_steps=steps or total,
        learning_rate=peak,
        min_learning_rate_ratio=last / peak,
        warmup=warm / total,
        weight_decay=0.01 if row else 0.0,
    )
    taper = TaperConfig(warmup=start / total, end=end / total, momentum=0.1, scale_loss=scale)
    # The paper's settings are kept whole; elsewhere what helped most is the default (docs/results/tapernorm.md).
    if row:
        return RemovalConfig(training=training, taper=taper, distill=0.0)
    return RemovalConfig(method=method, training=training, taper=taper, distill=1.0, taper_learning_rate=3e-3)


def _fake_gpt2(layers: int, steps: int | None) -> RemovalConfig:
    """FakeLN's own settings for a size of GPT-2; for another length of the run, in fractions of it."""
    total, warm, start, gaps, peak, last, scale = PRESETS[layers]
    sequential = SequentialConfig(start_step=start, gaps=gaps, scale_loss=scale)
    if steps not in (None, total):
        end = start + layers * sum(gaps) + sum(sequential.waits)
        sequential = SequentialConfig(warmup=start / total, end=end / total, scale_loss=scale)
    training = TrainingConfig(
        max_steps=steps or total,
        learning_rate=peak,
        min_learning_rate_ratio=last / peak,
        warmup=warm / total,
        weight_decay=0.01,
    )
    return RemovalConfig(method="fakeln", training=training, sequential=sequential, distill=0.0)
