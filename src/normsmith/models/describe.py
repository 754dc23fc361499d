"""Make a model's configuration say which norms it has now, so that saving never restores what was removed."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from normsmith.connections import Connection, connections
from normsmith.models.blocks import Attention, GeluMLP, SwiGLU
from normsmith.norms import Norm, norm_config

_REMOVED = {"kind": "identity"}


def norm_of(module: nn.Module | None) -> dict[str, Any]:
    """The configuration of what stands at a norm site, as plain values."""
    return dict(_REMOVED) if module is None else cast("Norm", module).config.to_dict()


def describe(model: PreTrainedModel) -> None:
    """Update `model.config`: the commonest norm of the connections, the sites that differ, the final norm, biases."""
    trunk = getattr(model, model.base_model_prefix, model)
    connection = cast("Any", model.config).connection_spec
    family = connections.get(connection.kind)
    owners = [(name, m) for name, m in trunk.named_modules() if isinstance(m, Connection | Attention)]
    sites = {f"{name}.{site}": (m, site) for name, m in owners for site in m.roles()}
    now = {name: norm_of(getattr(owner, site)) for name, (owner, site) in sites.items()}
    inner = {name: spec for name, spec in now.items() if isinstance(sites[name][0], Connection)}
    if inner:
        by_text = {repr(spec): spec for spec in inner.values()}
        model.config.norm = by_text[Counter(map(repr, inner.values())).most_common(1)[0][0]]
    # What the family would build for that norm; whatever differs is said by name.
    asked = norm_config(model.config.norm)
    built = {
        name: (
            owner.site_norm(site, asked) if isinstance(owner, Connection) else norm_config(family.attention_norms[site])
        ).to_dict()
        for name, (owner, site) in sites.items()
    }
    if isinstance(family.entry(trunk.config.hidden_size, connection, norm_config("rmsnorm")), Norm):
        now["entry"], built["entry"] = norm_of(cast("Norm | None", trunk.entry)), asked.to_dict()
    overrides = {name: spec for name, spec in now.items() if spec != built[name]}
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
