"""Turn the norms of a model into tapered ones and make the controller that removes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from normsmith.errors import InputError
from normsmith.norms import norms
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules.controller import TaperController, watching_controllers
from normsmith.schedules.taper import TaperConfig
from normsmith.surgery.find import NONE_FOUND, Site, Sites, find_norms
from normsmith.surgery.native import keep_changes
from normsmith.surgery.replace import attempted, carry_hooks, refuse_wrapped
from normsmith.surgery.select import select_sites
from normsmith.surgery.swap import forget_swaps, plain_norm

_TAPERED = {
    "rmsnorm": "tapered_rmsnorm",
    "layernorm": "tapered_layernorm",
}


@torch.inference_mode(False)  # parameters made in inference mode could never be trained
@torch.no_grad()
def taper_(
    model: nn.Module,
    config: TaperConfig | dict[str, Any] | None = None,
    *,
    steps: int | None = None,
    example: Any = None,
) -> TaperController:
    """Replace norms by tapered ones that compute the same, and return the controller that tapers them. In place.

    The model's function does not change until the controller's `step()` has passed the warm-up. Make the optimiser
    after this call: each tapered norm has one new parameter, γ̃.

    Args:
        model: a pre-norm transformer.
        config: the schedule; default `TaperConfig()`.
        steps: optimiser steps of the run; a Trainer fills it in.
        example: input for one forward pass, as in `find_norms`.

    Raises:
        InputError: nothing to taper, a norm that is no RMSNorm or LayerNorm, no final norm to anchor the scale, a model
            that does not run with tapered norms, or one inside DistributedDataParallel.
    """
    if isinstance(config, dict):
        config = TaperConfig(**config)
    if not isinstance(config, TaperConfig | None):
        raise InputError(f"taper_ takes a TaperConfig as its second argument, got {config!r}; write steps={config!r}?")
    config = config or TaperConfig()
    refuse_wrapped(getattr(model, "_orig_mod", model))
    sites = find_norms(model, example)
    chosen = choose_sites(sites, config.placement, config.where)
    new: dict[str, TaperedNorm] = {}
    for site in chosen:
        if isinstance(site.module, TaperedNorm):
            new[site.name] = site.module  # built tapered from its configuration, or tapered before
            continue
        if site.kind not in _TAPERED:
            raise InputError(f"{site.name} is a {site.kind}; only RMSNorm and LayerNorm sites can be tapered")
        cls = norms.get(_TAPERED[site.kind])
        new[site.name] = cast("TaperedNorm", cls.from_site(plain_norm(site), site.width))
        carry_hooks(site.module, new[site.name])
    anchor = find_anchor(sites, new, config.scale_loss)
    earlier = watching_controllers(model)
    with attempted(model, {name: new[site.name] for site in chosen for name in site.names}, example):
        controller = TaperController(config, new, anchor, steps)
        controller.watch_padding(getattr(model, "_orig_mod", model))
    for each in earlier:
        each.close()  # its schedule is replaced by this one
    keep_changes(model)
    forget_swaps(model)
    return controller


def find_anchor(sites: Sites, new: Mapping[str, nn.Module], scale_loss: float) -> nn.Module | None:
    """The final norm, or what replaces it among `new`, whose input a scale loss anchors; None without one."""
    # The last one: an encoder before a decoder has a final norm of its own.
    final = next((site for site in reversed(sites) if site.role == "final"), None)
    if final is None and scale_loss > 0:
        raise InputError(
            "no linear layer whose result the model returns reads a norm, so there is no final norm whose input the "
            "scale loss could anchor; write scale_loss=0"
        )
    return None if final is None else new.get(final.name, final.module)


def choose_sites(sites: Sites, placement: str, where: str | None) -> list[Site]:
    """The sites of a placement (`internal`, `final` or `all`) that `where` means.

    Raises:
        InputError: there is none, or the model is not a pre-norm model and no `where` says which sites to take.
    """
    post = [site.name for site in sites if site.role == "post"]
    if where is None and len(post) > sum(site.role == "pre" for site in sites):
        raise InputError(
            f"not a pre-norm model: {len(post)} norms also feed the residual stream ({', '.join(post[:3])}"
            f"{', …' if post[3:] else ''}), so they cannot be folded; choose single sites with where=, or train a "
            "pre-norm model"
        )
    roles = {"internal": ("pre",), "final": ("final",), "all": ("pre", "final")}[placement]
    chosen = [site for site in sites if site.role in roles]
    if chosen and where is not None:
        chosen = select_sites(Sites(chosen), where)
    if not chosen:
        found = f"its {len(sites)} norm(s) are:\n{sites}" if sites else NONE_FOUND
        raise InputError(f"no {' or '.join(roles)} norm to taper with placement={placement!r}: {found}")
    return chosen
