"""Turn the norms of a model into fake ones and make the controller that removes them one by one."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.norms import norms
from normsmith.norms.fakeln import FakeNorm
from normsmith.schedules.controller import watching_controllers
from normsmith.schedules.one_by_one import OneByOneController
from normsmith.schedules.sequential import SequentialConfig, Uses
from normsmith.surgery.attention import query_key_rows
from normsmith.surgery.find import Site, find_norms
from normsmith.surgery.native import keep_changes
from normsmith.surgery.replace import attempted, carry_hooks, refuse_wrapped
from normsmith.surgery.split import make_split, split_readers
from normsmith.surgery.swap import forget_swaps, plain_norm
from normsmith.surgery.taper import choose_sites, find_anchor
from normsmith.surgery.uses import Reader

_FAKE = {"rmsnorm": "fakeln_rms", "layernorm": "fakeln"}


@torch.inference_mode(False)
@torch.no_grad()
def remove_one_by_one_(
    model: nn.Module,
    config: SequentialConfig | dict[str, Any] | None = None,
    *,
    steps: int | None = None,
    example: Any = None,
) -> OneByOneController:
    """Replace norms by fake ones that compute the same, and return the controller that removes them. In place.

    The model's function does not change until the first removal. Which outputs of the linear layers after a norm are
    queries and keys is found by what they do; where they cannot be scaled apart from the values, the norm goes whole,
    in the turn of the values, and `controller.uses.inseparable` and `controller.reasons` say so.

    Args:
        model: a pre-norm transformer.
        config: the schedule; default `SequentialConfig()`.
        steps: optimiser steps of the run; a Trainer fills it in.
        example: input for one forward pass, as in `find_norms`.

    Raises:
        InputError: nothing to remove, a norm that is no RMSNorm or LayerNorm, no final norm for the auxiliary loss, or
            a schedule that goes beyond the run, a model that does not run with fake norms, or one inside
            DistributedDataParallel.
    """
    if isinstance(config, dict):
        config = SequentialConfig(**config)
    if not isinstance(config, SequentialConfig | None):
        raise InputError(
            f"remove_one_by_one_ takes a SequentialConfig as its second argument, got {config!r}; "
            f"write steps={config!r}?"
        )
    config = config or SequentialConfig()
    model = getattr(model, "_orig_mod", model)  # a compiled model is a wrapper around the one that is meant
    refuse_wrapped(model)
    sites = find_norms(model, example)
    chosen = choose_sites(sites, config.placement, config.where)
    new = {site.name: _fake(site) for site in chosen}
    anchor = find_anchor(sites, new, config.scale_loss)
    uses, readers, reasons = _uses(model, chosen, example)
    if steps is not None:
        config.plan(steps, uses)
    earlier = watching_controllers(model)
    with attempted(model, {name: new[site.name] for site in chosen for name in site.names}, example):
        splits = {name: make_split(model, new[name], found) for name, found in readers.items()}
        controller = OneByOneController(config, new, uses, splits, anchor, _end_tokens(model), steps)
        controller.reasons = reasons
        controller.watch_tokens(model)
    for each in earlier:
        each.close()  # its schedule is replaced by this one
    keep_changes(model)
    forget_swaps(model)
    return controller


def _fake(site: Site) -> FakeNorm:
    if isinstance(site.module, FakeNorm):
        raise InputError(f"{site.name} is being removed already: go on with the controller that was made for it")
    if site.kind not in _FAKE:
        raise InputError(f"{site.name} is a {site.kind}; only RMSNorm and LayerNorm sites can be removed")
    cls = norms.get(_FAKE[site.kind])
    new = cast("FakeNorm", cls.from_site(plain_norm(site), site.width))
    carry_hooks(site.module, new)
    return new


def _uses(
    model: nn.Module, chosen: list[Site], example: Any
) -> tuple[Uses, dict[str, dict[Reader, Tensor]], dict[str, str]]:
    """What each site is for; the readers of those that can be split, by name; and why the others cannot."""
    internal = [site for site in chosen if site.role != "final"]
    linears = {reader.module: model.get_submodule(reader.module) for s in internal for reader in s.consumers}
    rows = query_key_rows(model, linears, example)
    readers: dict[str, dict[Reader, Tensor]] = {}
    reasons: dict[str, str] = {}
    for site in internal:
        found = split_readers(model, site, rows)
        if isinstance(found, dict):
            readers[site.name] = found
        elif found:
            reasons[site.name] = found
    mlp = tuple(s.name for s in internal if s.name not in readers and s.name not in reasons)
    final = tuple(s.name for s in chosen if s.role == "final")
    return Uses(mlp, tuple(readers), tuple(reasons), final), readers, reasons


def _end_tokens(model: nn.Module) -> tuple[int, ...]:
    found = getattr(getattr(model, "config", None), "eos_token_id", None)
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)
