"""How well one fixed scale would do what a norm does, site by site, on real tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.surgery.example import placed
from normsmith.surgery.find import Site, Sites

_OUTLIER = 3.0  # times the median token scale


@dataclass(frozen=True)
class Removability:
    """What an audit found at one site.

    `residual` is the smallest ‖y − c·x̄ ⊙ γ‖ / ‖y‖ over the scale c, for y = x̄ ⊙ γ / s without its shift, with x̄ the
    (centred) input and s its root mean square: 0 means that the norm is a fixed scaling on this text. `scale` is that
    c. `variation` is the coefficient of variation of s over tokens, `outliers` the share of tokens whose s is more than
    three times the median, `first` the mean s at the first position divided by the mean elsewhere. `order` is the place
    in the recommended order of removal (1 first), None for a site that cannot be removed; `blocked` then says why.
    `parameters` is what removal saves.
    """

    name: str
    role: str
    kind: str
    residual: float
    scale: float
    variation: float
    outliers: float
    first: float
    parameters: int
    order: int | None
    blocked: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


@dataclass
class _Sums:
    scales: list[Tensor] = field(default_factory=list)
    firsts: list[Tensor] = field(default_factory=list)
    power: float = 0.0  # Σ ‖x̄γ‖²
    mixed: float = 0.0  # Σ ‖x̄γ‖²/s
    output: float = 0.0  # Σ ‖x̄γ‖²/s²

    def add(self, site: Site, x: Tensor) -> None:
        x = x.detach().double()
        x = x - x.mean(-1, keepdim=True) if site.facts.centred else x
        square = x.square().mean(-1)
        eps = site.facts.eps or 0.0
        s = (square + eps).sqrt() if site.facts.eps_position == "inside" else square.sqrt().clamp_min(eps or 1e-30)
        gain = site.facts.scale(site.module)
        power = (x if gain is None else x * gain.to(x.device)).square().sum(-1)
        self.power += float(power.sum())
        self.mixed += float((power / s).sum())
        self.output += float((power / s.square()).sum())
        first = s[:, 0] if s.ndim > 1 else s[:1]
        self.firsts.append(first.flatten().cpu())
        self.scales.append((s[:, 1:] if s.ndim > 1 else s[1:]).flatten().cpu())


@torch.no_grad()
def audit_removal(
    model: nn.Module, windows: Sequence[Tensor], sites: Sites, tick: Callable[[int], None] | None = None
) -> list[Removability]:
    """Audit every LayerNorm and RMSNorm site of a model on token windows.

    Args:
        model: a model that takes `input_ids`.
        windows: tensors of token ids, (batch, time), time > 1.
        sites: from `find_norms(model)`.
        tick: called with the number of windows done.

    Raises:
        InputError: no LayerNorm or RMSNorm ran on the windows.
    """
    sums = {site.name: _Sums() for site in sites if site.facts.plain}

    def hook_for(site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            sums[site.name].add(site, args[0])

        return hook

    handles = [site.module.register_forward_pre_hook(hook_for(site)) for site in sites if site.name in sums]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        for done, window in enumerate(windows, 1):
            model(**placed(model, {"input_ids": window}))
            if tick is not None:
                tick(done)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    found = [(site, sums[site.name]) for site in sites if site.name in sums and sums[site.name].output > 0]
    if not found:
        raise InputError("no LayerNorm or RMSNorm of the model ran on the text")
    return _ranked([_judge(site, s) for site, s in found])


def _judge(site: Site, sums: _Sums) -> Removability:
    scales, firsts = torch.cat(sums.scales), torch.cat(sums.firsts)
    every = torch.cat((scales, firsts))
    residual = math.sqrt(max(0.0, 1 - sums.mixed**2 / (sums.power * sums.output)))
    return Removability(
        site.name,
        site.role,
        site.kind,
        residual,
        sums.mixed / sums.power,
        float(every.std(correction=0) / every.mean()),
        float((every > _OUTLIER * every.median()).double().mean()),
        float(firsts.mean() / scales.mean()) if len(scales) else 1.0,
        sum(p.numel() for p in site.module.parameters()),
        None,
        site.blocked,
    )


def _ranked(found: list[Removability]) -> list[Removability]:
    """Number the removable sites, the one that a fixed scale explains best first; the final norm always last."""
    removable = sorted((r for r in found if not r.blocked), key=lambda r: (r.role == "final", r.residual))
    place = {r.name: i for i, r in enumerate(removable, 1)}
    return [replace(r, order=place.get(r.name)) for r in found]
