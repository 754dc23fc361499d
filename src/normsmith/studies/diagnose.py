"""What is measured in a finished run's model beside its scores: RUN/diagnostics.json, and numbers for result.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.data import default_collate as stack
from transformers import TrainerCallback

from normsmith.data import collate
from normsmith.diagnostics import anchoring, gate_report, stream_layers, stream_scale
from normsmith.errors import InputError
from normsmith.norms.tapered import TaperedNorm
from normsmith.report.attached import Panel
from normsmith.report.results import write_text
from normsmith.schedules import Controller, GateController
from normsmith.studies.files import DIAGNOSTICS
from normsmith.training import AnchoringCallback, GateSitesCallback

EXAMPLES = 8
"""Windows or examples that are looked at: about as much work as two steps of training with batches of as many."""


def diagnose(
    model: nn.Module, controller: Controller | None, examples: Dataset[Any], causal: bool, say: Callable[[str], None]
) -> tuple[list[Panel], dict[str, float]]:
    """Look into a trained model on the first `EXAMPLES` of the validation split; the model is not changed.

    Args:
        model: of the run, in any mode.
        controller: of its schedule.
        examples: the validation split.
        causal: whether it is a language model; else only stream, fixed scales and gates make sense.
        say: told what could not be measured.

    Returns:
        Panels (scale of the stream after each sublayer, update angle of each block, fixed scale c, weights and entropy
        of the gates, gradient norms by kind of weight), those that the model has, and further numbers.
    """
    device = next(model.parameters()).device
    inputs = _batch(examples, causal, device)
    panels = [_scales(model, inputs), *_fixed(model)]
    if isinstance(controller, GateController):
        panels += _gates(controller)
    numbers: dict[str, float] = {}
    if causal:
        for measure in (_angles, _anchors):
            try:
                panels += measure(model, inputs["input_ids"], numbers)
            except InputError as error:
                say(f"diagnostics: {error}")
    return panels, numbers


def watchers(controller: Controller | None, causal: bool) -> list[TrainerCallback]:
    """What logs along with every evaluation during training."""
    gates = [GateSitesCallback(controller)] if isinstance(controller, GateController) else []
    return [*([AnchoringCallback()] if causal else []), *gates]


def write_panels(folder: Path, panels: Sequence[Panel]) -> None:
    """Write `RUN/diagnostics.json`."""
    write_text(folder / DIAGNOSTICS, json.dumps([panel.to_dict() for panel in panels], indent=1) + "\n")


def _batch(examples: Dataset[Any], causal: bool, device: torch.device) -> dict[str, Tensor]:
    count = min(EXAMPLES, len(examples))  # pyright: ignore[reportArgumentType] (every data set here has a length)
    items = [examples[i] for i in range(count)]
    batch: Mapping[str, Tensor] = stack(items) if causal else collate(items)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _panel(title: str, x: Sequence[float | str], unit: str, x_label: str, **series: Sequence[float | None]) -> Panel:
    # JSON has no NaN.
    finite = {name: tuple(v if v is not None and math.isfinite(v) else None for v in s) for name, s in series.items()}
    return Panel(title=title, x=tuple(x), series=finite, unit=unit, x_label=x_label)


def _scales(model: nn.Module, inputs: dict[str, Tensor]) -> Panel:
    scales = stream_scale(model, **inputs)
    return _panel("RMS of the stream", range(len(scales)), "", "Sublayers so far", rms=scales)


def _fixed(model: nn.Module) -> list[Panel]:
    sites = {name: module for name, module in model.named_modules() if isinstance(module, TaperedNorm)}
    if not sites:
        return []
    scales = torch.stack([norm.scale for norm in sites.values()]).tolist()
    return [_panel("Fixed scale c of the tapered norms", list(sites), "", "Site", c=scales)]


def _gates(controller: GateController) -> list[Panel]:
    gates = gate_report(controller).gates
    sites = [gate.site for gate in gates]
    weights: dict[str, list[float | None]] = {
        name: [dict(zip(gate.candidates, gate.weights, strict=True)).get(name) for gate in gates]
        for name in dict.fromkeys(name for gate in gates for name in gate.candidates)
    }
    entropies: dict[str, list[float | None]] = {"entropy": [gate.entropy for gate in gates]}
    if controller.decided is not None and controller.config.rule != "never":
        entropies["at the decision"] = [controller.decided[site] for site in sites]
    return [
        _panel("Gate weights by site", sites, "", "Site", **weights),
        _panel("Gate entropy by site", sites, "nats", "Site", **entropies),
        _panel("Frozen gates by site", sites, "", "Site", frozen=[float(gate.frozen) for gate in gates]),
    ]


def _angles(model: nn.Module, ids: Tensor, numbers: dict[str, float]) -> list[Panel]:
    layers = stream_layers(model, [ids])[1:]
    places = [layer.layer for layer in layers]
    return [_panel("Update angle of each block", places, "rad", "Block", angle=[layer.angle for layer in layers])]


def _anchors(model: nn.Module, ids: Tensor, numbers: dict[str, float]) -> list[Panel]:
    found = anchoring(model, [ids])
    measured = {
        "radial_product": found.radial,
        "logit_norm": found.logit_norm,
        "stream_scale_mean": found.scale_mean,
        "stream_scale_std": found.scale_std,
    }
    numbers |= {name: value for name, value in measured.items() if math.isfinite(value)}
    gradients = list(found.gradients.values())
    return [_panel("Gradient norm by kind of weight", list(found.gradients), "", "Weights", norm=gradients)]
