"""Make a model's configuration say which norms it has now, so that saving never restores what was removed."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from normsmith.connections import Connection
from normsmith.models.blocks import Attention, GeluMLP, SwiGLU
from normsmith.norms import Norm

_REMOVED = {"kind": "identity"}


def norm_of(module: nn.Module | None) -> dict[str, Any]:
    """The configuration of what stands at a norm site, as plain values."""
    return dict(_REMOVED) if module is None else cast("Norm", module).config.to_dict()


def describe(model: PreTrainedModel) -> None:
    """Update `model.config`: the commonest norm of the connections, the sites that differ, the final norm, biases."""
    trunk = getattr(model, model.base_model_prefix, model)
    sites = {
        f"{name}.{site}": norm_of(getattr(module, site))
        for name, module in trunk.named_modules()
        if isinstance(module, Connection)
        for site in type(module).sites
    }
    if sites:
        by_text = {repr(spec): spec for spec in sites.values()}
        model.config.norm = by_text[Counter(map(repr, sites.values())).most_common(1)[0][0]]
        overrides = {name: spec for name, spec in sites.items() if spec != model.config.norm}
        model.config.norm_overrides = overrides or None
    model.config.final_norm = norm_of(cast("Norm | None", trunk.norm))
    model.config.input_bias = _even_biases(trunk)
    head = model.get_output_embeddings()
    model.config.head_bias = getattr(head, "bias", None) is not None


def _even_biases(trunk: nn.Module) -> bool:
    # One flag stands for all input projections: where folding gave some of them a bias, the others get a zero one.
    readers = [linear for module in trunk.modules() for linear in _input_projections(module)]
    biased = any(linear.bias is not None for linear in readers)
    for linear in readers:
        if biased and linear.bias is None:
            linear.bias = nn.Parameter(torch.zeros_like(linear.weight[:, 0]))
    return biased


def _input_projections(module: nn.Module) -> list[nn.Linear]:
    if isinstance(module, Attention):
        return [module.q_proj, module.k_proj, module.v_proj]
    if isinstance(module, SwiGLU):
        return [module.gate_proj, module.up_proj]
    return [module.up_proj] if isinstance(module, GeluMLP) else []
