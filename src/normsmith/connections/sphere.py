"""Residual connections as retractions on a hypersphere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from normsmith.connections.base import Connection, ConnectionConfig, connections
from normsmith.norms.base import NormConfig, norm_config
from normsmith.ops.sphere import sphere_update, sphere_update_reference
from normsmith.ops.statistics import widen

_POWERS = {"sqrt": 0.5, "harmonic": 1.0, "none": 0.0}  # λ_l = l^−power
_SMALLEST_P = 1e-3  # of a learned p, whose square must not vanish in float32


class SphereConfig(ConnectionConfig):
    """Options of `sphere`.

    `p` is the member of the family (`inf` is the exponential map); with `learn_p` it is where a p = softplus(q) of
    every sublayer starts, which no paper has tried. The step of sublayer l is λ_l·α: `step` says how α is made from its
    parameter (`softplus`: positive, `sigmoid`: below 1, `raw`: any number), `alpha` is its initial value (default 1,
    and ½ for `sigmoid`), `per_channel` learns one for every channel, which weights F before the projection. `decay`
    damps with l, `sqrt` 1/√l, `harmonic` 1/l, `linear` (L + 1 − l)/L, or not at all; `count` says whether l numbers the
    sublayers (L = 2N) or the blocks (L = N). `learn_radius` makes the radius a parameter of the model (√d at the start
    in any case); `rescale` divides by the measured norm after each update, which p = 1 does by itself; `clamp` is the
    largest angle of an update, for p = ∞ only; `final_norm` is a `gain`-only RMSNorm before the head or `none`.
    """

    kind: Literal["sphere"] = "sphere"
    p: float = Field(default=1.0, gt=0)
    decay: Literal["sqrt", "harmonic", "linear", "none"] = "sqrt"
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    learn_radius: bool = True
    rescale: bool = False
    step: Literal["softplus", "sigmoid", "raw"] = "softplus"
    count: Literal["sublayer", "block"] = "sublayer"
    per_channel: bool = False
    learn_p: bool = False
    clamp: float | None = Field(default=None, gt=0, le=math.pi)
    final_norm: Literal["gain", "none"] = "gain"

    def check(self) -> None:
        """What each option asks of the others."""
        if self.step == "sigmoid" and self.start() >= 1:
            raise ValueError(f"alpha = {self.alpha}: a sigmoid step starts below 1; write for example alpha: 0.5")
        if self.clamp is not None and (self.learn_p or not math.isinf(self.p)):
            raise ValueError(f"clamp = {self.clamp}: only the exponential map is clamped; write p: inf or no clamp")
        if self.learn_p and math.isinf(self.p):
            raise ValueError("learn_p starts from a finite p; write for example p: 2")

    def start(self) -> float:
        """The initial α."""
        if self.alpha is not None:
            return self.alpha
        return 0.5 if self.step == "sigmoid" else 1.0


class SphereEntry(nn.Module):
    """h₀ = r·x/‖x‖ in float32, r = softplus(ρ), √d at the start: the stream's place on the sphere.

    Lengths below 1e-5 count as 1e-5, so that the gradient of a tiny or all-zero embedding stays finite; every longer
    one lands exactly on the sphere. Source: ScaleNorm (arXiv 1910.05895); how SpheretNorm modified it is not public.
    """

    rho: nn.Parameter | None

    def __init__(self, width: int, learn_radius: bool) -> None:
        super().__init__()
        self.width = width
        radius = math.sqrt(width)
        self.register_parameter("rho", nn.Parameter(torch.tensor(inverse_softplus(radius))) if learn_radius else None)

    def fresh(self) -> SphereEntry:
        """A new one with its initial radius."""
        return SphereEntry(self.width, learn_radius=self.rho is not None)

    def radius(self) -> Tensor | float:
        """Return r: 0-dim float32 (float64 in a float64 model) if it is learned, else the number √d."""
        return math.sqrt(self.width) if self.rho is None else F.softplus(widen(self.rho))

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d) float32, or float64 for float64 input."""
        wide = widen(x)
        return wide * (self.radius() * torch.rsqrt(wide.square().sum(-1, keepdim=True).clamp_min(1e-10)))


# GeoNorm as published: the plain angle, at most π/4, damped by 1/k in block k. Its bias (0 at the start) is left out.
_GEONORM = {
    "p": math.inf,
    "clamp": math.pi / 4,
    "decay": "harmonic",
    "count": "block",
    "step": "raw",
}


@connections.register("sphere", proj={"p": 1.0}, cay={"p": 2.0}, geo={"p": math.inf}, geonorm=_GEONORM)
class Sphere(Connection):
    """The stream moves on the sphere of radius r; see `normsmith.ops.sphere` for the update (arXiv 2608.02668).

    The sublayer reads h itself: at r = √d it has RMS 1 already. The step of sublayer l is s = λ_l·softplus(a) with one
    learned scalar a and the fixed damping λ_l. The stream is float32 (float64 in a float64 model), also under autocast.
    """

    Config = SphereConfig
    config: SphereConfig
    q: nn.Parameter | None

    def __init__(
        self,
        width: int,
        index: int = 1,
        total: int = 1,
        norm: str | dict[str, Any] | NormConfig = "rmsnorm",
        config: ConnectionConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(width, index, total, norm, config, **options)
        start = _INVERSE[self.config.step](self.config.start())
        self.alpha = nn.Parameter(torch.full((width,) if self.config.per_channel else (), start))
        learned = nn.Parameter(torch.tensor(inverse_softplus(self.config.p))) if self.config.learn_p else None
        self.register_parameter("q", learned)
        by_block = self.config.count == "block"
        place, last = (self.block, total / 2) if by_block else (index, total)
        linear = self.config.decay == "linear"
        self.damping = (last + 1 - place) / last if linear else place ** -_POWERS[self.config.decay]
        # In a tuple, so that the entry's parameter is registered once, with the entry and not with every connection.
        self._entry: tuple[SphereEntry | None] = (None,)

    def bind(self, entry: nn.Module | None) -> None:
        """Take the radius from the stream's entry; unbound, it is √d."""
        self._entry = (cast("SphereEntry | None", entry),)

    def radius(self) -> Tensor | float:
        """Return r, a 0-dim tensor if it is learned."""
        entry = self._entry[0]
        return math.sqrt(self.width) if entry is None else entry.radius()

    def step_size(self) -> Tensor:
        """Return s = λ_l·α, 0-dim, or (d,) with `per_channel`."""
        return self.damping * _FUNCTIONS[self.config.step](widen(self.alpha))

    def power(self) -> Tensor | float:
        """Return p, a 0-dim tensor if it is learned."""
        return self.config.p if self.q is None else F.softplus(widen(self.q)).clamp_min(_SMALLEST_P)

    def prepare(self, h: Tensor) -> Tensor:
        """Return h in the dtype of the parameters."""
        return h.to(self.alpha.dtype)

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """The retraction of s·(tangential part of out) at h."""
        options = self.config
        return sphere_update(h, out, self.step_size(), self.radius(), self.power(), options.rescale, options.clamp)

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        p = self.power()
        rescale = self.config.rescale or (self.q is None and self.config.p == 1)
        p = p.double() if isinstance(p, Tensor) else p
        return sphere_update_reference(h, out, self.step_size(), self.radius(), p, rescale, self.config.clamp)

    @classmethod
    def entry(cls, width: int, config: ConnectionConfig, norm: NormConfig) -> SphereEntry:
        """The projection of the embeddings on the sphere."""
        return SphereEntry(width, cast("SphereConfig", config).learn_radius)

    @classmethod
    def final_norm(cls, norm: NormConfig, config: ConnectionConfig) -> NormConfig:
        """A gain-only RMSNorm before the head, or nothing."""
        return norm_config("rmsnorm" if cast("SphereConfig", config).final_norm == "gain" else "identity")


def inverse_softplus(y: float) -> float:
    """The x with log(1 + eˣ) = y, for y > 0."""
    return y + math.log(-math.expm1(-y))


def _logit(y: float) -> float:
    return math.log(y) - math.log1p(-y)


def _itself(x: Any) -> Any:
    return x


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"softplus": F.softplus, "sigmoid": torch.sigmoid, "raw": _itself}
_INVERSE: dict[str, Callable[[float], float]] = {"softplus": inverse_softplus, "sigmoid": _logit, "raw": _itself}
