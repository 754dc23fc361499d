"""Runs that one process and several must do alike, from the same recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from normsmith.data import TextData
from normsmith.norms.autonorm import AutoNorm
from normsmith.studies.recipe import Recipe
from normsmith.studies.runner import build_scheduled, run_recipe
from normsmith.studies.tasks import facts_of, limited, parts_of
from normsmith.training import AnchoringCallback, Reporter, Trainer

STEPS, GLOBAL_BATCH = 6, 8
TAPER = {"kind": "taper", "warmup": 0.5, "momentum": 0.3, "scale_loss": 1.0}
FREEZE = {"kind": "gate_freeze", "freeze_step": 3, "rule": "always"}


def recipe(source: str, processes: int, training: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    """A tiny run whose batches hold `GLOBAL_BATCH` windows in all, however many processes share them."""
    run = {"max_steps": STEPS, "batch_size": GLOBAL_BATCH // processes, "learning_rate": 1e-2, "warmup": 0}
    return Recipe(
        **{
            "data": {"source": source, "vocab_size": 300, "sequence_length": 16, "validation_fraction": 0.2},
            "model": {"preset": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            "training": {**run, "log_every": 1, **(training or {})},
            "evaluation": {"windows": 30},
            **changes,
        }
    )


def tapered(source: str, processes: int, training: dict[str, Any] | None = None) -> Recipe:
    # The 30 windows of the evaluation are no multiple of the batch.
    more = {"evaluate_every": 3, "save_every": 3, "weight_average": 0.9, "gradient_accumulation": 2}
    return recipe(source, processes, {**more, **(training or {})}, schedule=TAPER, connection={"kind": "pre"})


def ngpt(source: str, processes: int) -> Recipe:
    training = {"max_steps": 3, "evaluate_every": 1, "keep": "best"}
    return recipe(source, processes, training, connection={"kind": "ngpt"})


def numbers(chosen: Recipe, folder: Path, **options: Any) -> dict[str, Any]:
    """What a whole run found: its history, its validation loss and its weights."""
    run = run_recipe(chosen, folder, Reporter(quiet=True), **options)
    state = run.controller.state_dict() if run.controller is not None else {}
    return {
        "history": list(run.history),
        "validation": run.validation_loss,
        "weights": sums(run.model),
        "moments": state.get("moments"),
        "target": state.get("target"),
    }


def gated(source: str, data: TextData, folder: Path, processes: int) -> dict[str, Any]:
    """AutoNorm without its noise, which no two numbers of processes can share, frozen after step 3.

    Shared runs recompute their activations: there DDP is not told to expect unused parameters by transformers.
    """
    training = {"evaluate_every": 3, "activation_checkpointing": processes > 1}
    chosen = recipe(source, processes, training, norm={"kind": "autonorm"}, schedule=FREEZE)
    model, controller = build_scheduled(chosen, facts_of(data))
    gates = [module for module in model.modules() if isinstance(module, AutoNorm)]
    with torch.no_grad():
        for gate in gates:
            gate.noise.zero_()
            gate.selector_out.mul_(10)  # so that weights and entropy differ from token to token
    parts = parts_of(chosen, data)
    trainer = Trainer(
        model,
        chosen.training.arguments(folder, chosen.seed),
        train_dataset=parts.train,
        eval_dataset=limited(parts.validation, 24),
        controller=controller,
        callbacks=[AnchoringCallback()],
    )
    trainer.train()
    selectors = [p for gate in gates for p in gate.selector_parameters()]
    logged = [e for e in trainer.state.log_history if {"loss", "eval_loss"} & e.keys()]
    names = ("loss", "eval_loss", "gate_entropy", "gate_frozen", "logit_norm", "stream_scale_mean")
    return {
        "history": [{"step": e["step"], **{n: e[n] for n in names if n in e}} for e in logged],
        "weights": sums(model),
        "selectors stopped": all(not p.requires_grad and p.grad is None for p in selectors),
    }


def distilled(source: str, data: TextData, folder: Path, processes: int) -> dict[str, Any]:
    """A model that learns from another: the loss is of the global batch, however many processes share it."""
    chosen = recipe(source, processes)
    torch.manual_seed(0)
    teacher, _ = build_scheduled(chosen.changed(seed=7), facts_of(data))
    model, _ = build_scheduled(chosen, facts_of(data))
    for each in (teacher, model):
        each.lm_head.weight.data.mul_(20)  # so that the two predictions differ
    arguments = chosen.training.arguments(folder, chosen.seed)
    trainer = Trainer(model, arguments, train_dataset=parts_of(chosen, data).train, teacher=teacher, distill=0.7)
    trainer.train()
    logged = [e for e in trainer.state.log_history if "loss" in e]
    names = ("step", "loss", "grad_norm")
    return {"history": [{n: e[n] for n in names} for e in logged], "weights": sums(model)}


def noise(source: str, data: TextData, folder: Path, processes: int) -> float:
    """A random number as this rank's gates would draw it in training."""
    chosen = recipe(source, processes)
    model, _ = build_scheduled(chosen, facts_of(data))
    Trainer(model, chosen.training.arguments(folder, 0), train_dataset=parts_of(chosen, data).train)
    return float(torch.rand(()))


def sums(model: nn.Module) -> dict[str, float]:
    return {name: float(p.detach().double().square().sum()) for name, p in model.named_parameters()}
