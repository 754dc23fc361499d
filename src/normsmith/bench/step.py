"""A whole training step of the reference model, for any arms that `normsmith compare` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.bench.timing import Timing, compiling, interleave, seconds_of
from normsmith.data import Facts
from normsmith.data.kinds import data_config
from normsmith.models import ModelConfig
from normsmith.schedules import Controller, TaperController
from normsmith.studies.arms import arm_recipe
from normsmith.studies.recipe import Recipe
from normsmith.studies.runner import build_scheduled
from normsmith.training import TrainingConfig

_VOCABULARY = 1000
_PATCH = 4  # pixels
_STEPS = 100_000  # of the imagined run; the few that are measured do not leave their phase of it


def bench_training_step(
    arms: Sequence[str] = ("pre", "proj", "geo"),
    width: int = 384,
    layers: int = 4,
    batch: int = 2,
    sequence: int = 256,
    rounds: int = 12,
    compiled: bool = True,
    tick: Callable[[int], None] | None = None,
    *,
    preset: str = "llama",
    heads: int | None = None,
    images: bool = False,
) -> dict[str, Timing]:
    """Seconds of one optimiser step (forward, backward, AdamW, controller) per arm; the first is the reference.

    An arm with a taper is measured three times: in its warm-up, in the middle of the taper, and after it.

    Args:
        arms: as in `normsmith compare`: `pre`, `sphere:p=1`, `rmsnorm+taper`, `autonorm` …
        width: of the model.
        layers: blocks.
        batch: sequences per step.
        sequence: tokens of each.
        rounds: measured rounds.
        compiled: compile the models.
        tick: called after each round.
        preset: the kind of block, as in `preset_config`.
        heads: attention heads; default: one for each 64 channels.
        images: a vision transformer and images of `sequence` patches, where no token stands before another, instead of
            a language model.

    Raises:
        InputError: an unknown arm, or sizes that do not fit together.
    """
    facts, inputs = _images(batch, sequence) if images else _tokens(batch, sequence)
    base = Recipe(
        data=data_config({"kind": "images" if images else "text"}),
        model=ModelConfig(
            preset=preset,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads or max(1, width // 64),
            patch_size=_PATCH,
        ),
        training=TrainingConfig(max_steps=_STEPS),
    )
    recipes = {arm: arm_recipe(base, arm) for arm in arms}  # a wrong name is known before anything is compiled
    cases: dict[str, Callable[[], float]] = {}
    for arm, recipe in recipes.items():
        model, controller = build_scheduled(recipe, facts)
        if not isinstance(controller, TaperController):
            cases[arm] = step_case(model, controller, inputs, compiled)
            continue
        start, end = controller.config.span(_STEPS)
        phases = {"warm-up": 1, "tapering": (start + end) // 2, "after": _STEPS - 1}
        for phase, completed in phases.items():
            model, controller = build_scheduled(recipe, facts)
            assert controller is not None
            controller.load_state_dict({**controller.state_dict(), "completed": int(completed)})
            cases[f"{arm}, {phase}"] = step_case(model, controller, inputs, compiled)
    with compiling(len(cases)) if compiled else nullcontext():
        return interleave(cases, rounds, warmup=3, tick=tick)


def _tokens(batch: int, length: int) -> tuple[Facts, dict[str, Tensor]]:
    ids = torch.randint(_VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    return Facts(vocab_size=_VOCABULARY, length=length), {"input_ids": ids, "labels": ids}


def _images(batch: int, patches: int) -> tuple[Facts, dict[str, Tensor]]:
    size, labels = (_PATCH, _PATCH * patches), tuple("0123456789")
    pixels = torch.rand(batch, 3, *size, generator=torch.Generator().manual_seed(0))
    facts = Facts(labels=labels, image_size=size, channels=3)
    return facts, {"pixel_values": pixels, "labels": torch.arange(batch) % len(labels)}


def step_case(
    model: nn.Module, controller: Controller | None, inputs: Mapping[str, Tensor], compiled: bool
) -> Callable[[], float]:
    """A function that trains the model for one step on `inputs` and returns its seconds."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run: Callable[..., Any] = torch.compile(model) if compiled else model

    def step() -> None:
        loss = run(**inputs).loss
        if controller is not None:
            loss = loss + controller.auxiliary_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if controller is not None:
            controller.step()

    return lambda: seconds_of(step)
