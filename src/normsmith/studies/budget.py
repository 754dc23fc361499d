"""What a run would cost, from its recipe alone: parameters, tokens, arithmetic, memory, hours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normsmith.errors import InputError
from normsmith.studies.arms import arm_recipe, set_values
from normsmith.studies.recipe import Recipe
from normsmith.studies.runner import build_model
from normsmith.studies.study import sweep_points
from normsmith.studies.tasks import known_facts


@dataclass(frozen=True)
class Machine:
    """What is assumed of one accelerator: dense peak in FLOP/s, share of it that training reaches, memory in bytes."""

    name: str = "A100 80 GB, bf16"
    peak: float = 312e12
    utilisation: float = 0.4
    memory: float = 80e9


@dataclass(frozen=True)
class Budget:
    """The cost of one run.

    Attributes:
        parameters: of the model; tied weights count once.
        tokens: positions that are trained on, over all processes (patches of images, columns of tables).
        flops: of the training; see `budget`.
        memory: bytes per process while training; see `budget`.
        hours: of `machine`, all processes together.
    """

    parameters: int
    tokens: int
    flops: float
    memory: float
    hours: float


def budget(recipe: Recipe, processes: int = 1, machine: Machine | None = None) -> Budget:
    """Estimate what a run costs; no weight is made.

    Arithmetic (Kaplan et al., arXiv 2001.08361; Chowdhery et al., arXiv 2204.02311), forward and backward:
    tokens · (6·n + 12·N·d·T), n the parameters that multiply every token (all but embeddings that are only looked up),
    N blocks, d the width, T the length.
    Memory: 16 bytes per parameter (weight, gradient, two AdamW moments, all float32), and per token of a micro-batch
    N·d·34 bytes of activations in 16 bit, 68 in 32 bit (Korthikanti et al., arXiv 2205.05198, attention that stores no
    scores), or N·d·4 (8) with activation checkpointing, and 10 bytes per entry of the vocabulary for the logits.

    Args:
        recipe: the run.
        processes: that share it, as with torchrun.
        machine: default: an A100.
    """
    machine = machine or Machine()
    facts = known_facts(recipe)
    with torch.device("meta"):
        model = build_model(recipe, facts)
    config = model.config
    parameters = model.num_parameters()
    embedded = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding))
    tied = recipe.data.kind == "text" and config.tie_word_embeddings
    multiplied = parameters - (0 if tied else embedded)
    length = _length(recipe)
    blocks, width = config.num_hidden_layers, config.hidden_size
    tokens = recipe.training.sequences * length * processes
    flops = tokens * (6.0 * multiplied + 12.0 * blocks * width * length)
    kept = 4 if recipe.training.activation_checkpointing else 34  # bytes of 16-bit activations
    per_token = blocks * width * kept * (1 if recipe.training.bf16 else 2)
    logits = 10 * facts.vocab_size if recipe.data.kind == "text" else 0
    memory = 16.0 * parameters + recipe.training.batch_size * length * float(per_token + logits)
    hours = flops / (machine.peak * machine.utilisation) / 3600
    return Budget(parameters, tokens, flops, memory, hours)


def check_memory(recipe: Recipe, available: float | None = None) -> None:
    """Refuse a run whose estimated memory is more than there is (of the accelerator, or of the machine without one).

    Raises:
        InputError: with both numbers and what to change.
    """
    available = _memory() if available is None else available
    cost = budget(recipe)
    if cost.memory <= available:
        return
    remedy = (
        "its weights and what AdamW keeps of them are more than that; lower model.hidden_size or "
        "model.num_hidden_layers"
        if 16.0 * cost.parameters > available
        else "lower training.batch_size (and raise training.gradient_accumulation), or write "
        "training.activation_checkpointing: true"
    )
    raise InputError(
        f"the recipe {recipe.name!r} needs about {cost.memory / 1e9:.1f} GB to train and there are "
        f"{available / 1e9:.1f} GB: {remedy}"
    )


def check_study_memory(shared: Recipe, arms: Sequence[str], sweep: dict[str, tuple[str, ...]]) -> None:
    """Refuse a study of which one run at least would not fit; arguments as `plan_study` takes and gives them.

    Raises:
        InputError: as `check_memory`.
    """
    for arm in arms:
        for settings in sweep_points(sweep).values():
            check_memory(set_values(arm_recipe(shared, arm), settings).changed(name=arm))


def _memory() -> float:
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    import psutil

    return float(psutil.virtual_memory().total)


def _length(recipe: Recipe) -> int:
    facts = known_facts(recipe)
    if recipe.data.kind == "images":
        patch = recipe.model.patch_size
        return facts.image_size[0] // patch * (facts.image_size[1] // patch) + 1
    return len(facts.features) + 1 if recipe.data.kind == "table" else facts.length
