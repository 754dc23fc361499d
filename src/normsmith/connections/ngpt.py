"""nGPT: every vector of the model on the unit sphere."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.connections.base import Connection, ConnectionConfig, connections
from normsmith.norms.base import NormConfig, norm_config
from normsmith.ops.statistics import widen

_SHORTEST = 1e-5  # a shorter vector counts as that long, so that the zero output of a sublayer has finite gradients


def unit(x: Tensor) -> Tensor:
    """x/max(‖x‖, 1e-5) along the last axis, (…, d) → (…, d)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True).clamp_min(_SHORTEST**2))


def unit_reference(x: Tensor) -> Tensor:
    """`unit` in float64."""
    x = x.double()
    return x / x.norm(dim=-1, keepdim=True).clamp_min(_SHORTEST)


class NGPTConfig(ConnectionConfig):
    """Options of `ngpt`: `alpha` is the initial step towards the sublayer's output, the same for every channel."""

    kind: Literal["ngpt"] = "ngpt"
    alpha: float = Field(default=0.05, gt=0)


class Scale(nn.Module):
    """x ⊙ factor·s with learned s, (…, d) → (…, d); s starts at `stored`, factor·stored is the effective start.

    The optimiser's step is the same for every parameter, so what is stored smaller moves relatively faster.
    """

    def __init__(self, shape: tuple[int, ...], value: float, stored: float) -> None:
        super().__init__()
        self.shape, self.value, self.stored = shape, value, stored
        self.factor = value / stored
        self.gamma = nn.Parameter(torch.full(shape, stored))

    def fresh(self) -> Scale:
        """A new one with its initial values."""
        return Scale(self.shape, self.value, self.stored)

    def forward(self, x: Tensor) -> Tensor:
        """In the dtype of x."""
        return x * (self.factor * self.gamma).to(x.dtype)

    def extra_repr(self) -> str:
        """Shape and start."""
        return f"{self.shape}, start={self.value:g}"


class QueryKeyScale(nn.Module):
    """q ← s ⊙ q/‖q‖ and k ← s ⊙ k/‖k‖ per head, (batch, heads, time, head width), for a softmax scale of √width.

    s has an entry for every feature of every key head; the query heads of a group share those of their key head.
    """

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        self.softmax_scale = head_width**0.5
        self.scale = Scale((heads, 1, head_width), 1.0, (heads * head_width) ** -0.5)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Computed in float32, returned in the dtype of q and k."""
        groups = q.shape[1] // k.shape[1]
        s = self.scale.factor * widen(self.scale.gamma)
        wide = s if groups == 1 else s.repeat_interleave(groups, dim=0)
        return (wide * unit(widen(q))).to(q.dtype), (s * unit(widen(k))).to(k.dtype)

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The formula in float64, head by head."""
        s = self.scale.factor * self.scale.gamma.double()
        groups = q.shape[1] // k.shape[1]
        heads = [s[i // groups] * unit_reference(q[:, i]) for i in range(q.shape[1])]
        return torch.stack(heads, 1), torch.stack([s[i] * unit_reference(k[:, i]) for i in range(k.shape[1])], 1)


class UnitEntry(nn.Module):
    """h₀ = x/max(‖x‖, 1e-5) in float32: the stream's place on the unit sphere, where normalised embeddings are already.

    Learned positions add to the embedding and would leave it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d) float32, or float64 for float64 input."""
        return unit(widen(x))


@connections.register("ngpt")
class NGPT(Connection):
    """unit(h + α ⊙ (unit(F(h)) − h)) with a learned α per channel, no norms (nGPT, arXiv 2410.01131).

    The stream has unit length and is float32 (float64 in a float64 model). α starts at 0.05 and is stored as
    1/√d. The rest of the method sits elsewhere: queries and keys have unit length times
    s_qk under a softmax scale of √width, s_u and s_v·√d multiply what the MLP's input projections give, s_z the logits,
    and all matrices and embeddings have unit length along the stream's axis, which a training loop restores after
    every step (`model.normalize_weights_()`; normsmith's Trainer does).
    """

    Config = NGPTConfig
    config: NGPTConfig
    unit_weights = True

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
        self.factor = self.config.alpha * width**0.5
        self.alpha = nn.Parameter(torch.full((width,), width**-0.5))

    def step_size(self) -> Tensor:
        """The effective α, (d,) in float32 or float64."""
        return self.factor * widen(self.alpha)

    def prepare(self, h: Tensor) -> Tensor:
        """Return h in the dtype of the parameters."""
        return h.to(self.alpha.dtype)

    def merge(self, h: Tensor, out: Tensor) -> Tensor:
        """The step on the unit sphere, in float32, returned in the dtype of h."""
        wide = widen(h)
        return unit(wide + self.step_size() * (unit(out.to(wide.dtype)) - wide)).to(h.dtype)

    def reference(self, h: Tensor, out: Tensor) -> Tensor:
        """The formula in float64."""
        h, alpha = h.double(), self.factor * self.alpha.double()
        return unit_reference(h + alpha * (unit_reference(out) - h))

    @classmethod
    def entry(cls, width: int, config: ConnectionConfig, norm: NormConfig) -> UnitEntry:
        """The projection of the embeddings on the unit sphere."""
        return UnitEntry()

    @classmethod
    def final_norm(cls, norm: NormConfig, config: ConnectionConfig) -> NormConfig:
        """None: the stream has unit length."""
        return norm_config("identity")

    @classmethod
    def deviation(cls, role: str, total: int, scaled: bool) -> float:
        """1: the length is normalised away."""
        return 1.0

    @classmethod
    def attention_scale(cls, heads: int, head_width: int) -> QueryKeyScale:
        """Unit queries and keys."""
        return QueryKeyScale(heads, head_width)

    @classmethod
    def hidden_scale(cls, hidden: int, width: int, activated: bool) -> Scale:
        """s_v·√d where the nonlinearity reads it, s_u elsewhere; both are stored as they start, as published."""
        return Scale((hidden,), width**0.5 if activated else 1.0, 1.0)

    @classmethod
    def logit_scale(cls, outputs: int, width: int) -> Scale:
        """s_z, 1 at the start, stored times 1/√d."""
        return Scale((outputs,), 1.0, width**-0.5)
