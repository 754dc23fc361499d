"""Residual connections as retractions on a hypersphere."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from normsmith.connections.base import Connection, ConnectionConfig, connections
from normsmith.norms.base import NormConfig, norm_config
from normsmith.ops.sphere import sphere_update, sphere_update_reference

_POWERS = {"sqrt": 0.5, "harmonic": 1.0, "none": 0.0}  # λ_l = l^−power


class SphereConfig(ConnectionConfig):
    """Options of `sphere`.

    `p` is the member of the family (`inf` is the exponential map); `decay` damps the step of sublayer l by 1/√l, 1/l or
    not at all; `alpha` is the initial step before damping; `learn_radius` makes the radius a parameter of the model
    (√d at the start in any case); `rescale` divides by the measured norm after each update, which p = 1 does by itself.
    """

    kind: Literal["sphere"] = "sphere"
    p: float = Field(default=1.0, gt=0)
    decay: Literal["sqrt", "harmonic", "none"] = "sqrt"
    alpha: float = Field(default=1.0, gt=0)
    learn_radius: bool = True
    rescale: bool = False


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

    def radius(self) -> Tensor | float:
        """Return r: 0-dim float32 (float64 in a float64 model) if it is learned, else the number √d."""
        if self.rho is None:
            return math.sqrt(self.width)
        return F.softplus(self.rho if self.rho.dtype == torch.float64 else self.rho.float())

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d) float32, or float64 for float64 input."""
        wide = x if x.dtype == torch.float64 else x.float()
        return wide * (self.radius() * torch.rsqrt(wide.square().sum(-1, keepdim=True).clamp_min(1e-10)))


@connections.register("sphere", proj={"p": 1.0}, cay={"p": 2.0}, geo={"p": math.inf})
class Sphere(Connection):
    """The stream moves on the sphere of radius r; see `normsmith.ops.sphere` for the update (arXiv 2608.02668).

    The sublayer reads h itself: at r = √d it has RMS 1 already. The step of sublayer l is s = λ_l·softplus(a) with one
    learned scalar a and the fixed damping λ_l. The stream is float32 (float64 in a float64 model), also under autocast.
    """

    Config = SphereConfig
    config: SphereConfig

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
        self.alpha = nn.Parameter(torch.tensor(inverse_softplus(self.config.alpha)))
        self.damping = index ** -_POWERS[self.config.decay]
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
        """Return s = λ_l·softplus(a), 0-dim."""
        return self.damping * F.softplus(self.alpha if self.alpha.dtype == torch.float64 else self.alpha.float())

    def prepare(self, h: Tensor) -> Tensor:
        """Return h in the dtype of the parameters."""
        return h.to(self.alpha.dtype)

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """The retraction of s·(tangential part of out) at h."""
        return sphere_update(h, out, self.step_size(), self.radius(), self.config.p, self.config.rescale)

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        rescale = self.config.rescale or self.config.p == 1
        return sphere_update_reference(h, out, self.step_size(), self.radius(), self.config.p, rescale)

    @classmethod
    def entry(cls, width: int, config: ConnectionConfig) -> SphereEntry:
        """The projection of the embeddings on the sphere."""
        return SphereEntry(width, cast("SphereConfig", config).learn_radius)

    @classmethod
    def final_norm(cls, norm: NormConfig) -> NormConfig:
        """A gain-only RMSNorm before the head."""
        return norm_config("rmsnorm")


def inverse_softplus(y: float) -> float:
    """The x with log(1 + eˣ) = y, for y > 0."""
    return y + math.log(-math.expm1(-y))
