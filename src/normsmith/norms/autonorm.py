"""AutoNorm: a gate that learns which of several norms each token or sample gets."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import NormConfig, norms
from normsmith.norms.mixture import MixtureConfig, MixtureNorm, uniform_start
from normsmith.ops.gate import (
    Selector,
    gate_logits,
    gate_reference,
    gate_weights,
    gumbel_weights,
    masked_mean,
    mix_reference,
    one_hot_maximum,
    pool_reference,
    pool_tokens,
)
from normsmith.ops.statistics import widen

# Names of the buffers that a schedule or the record of the forward pass changes; they stay float32.
STATE = ("tau", "noise", "frozen", "static", "static_weights", "weight_sum", "entropy_sum", "batches")


class AutoNormConfig(MixtureConfig):
    """Options of `autonorm`.

    Args:
        candidates: the norms to choose from, two or more names or configurations; `layernorm/dyt` in one text.
        pool: what the gate sees: `token` (each token by itself, the default and the only safe one in causal models) or
            `sequence` (the mean over the sample's valid tokens at this site, as published).
        tau: temperature of the Gumbel-Softmax.
        tau_end: temperature at the end of the run, reached geometrically under a controller of the gates, which every
            run of a recipe has; None: constant.
        hard: one candidate per sample in training, with the straight-through gradient; else the soft sample.
        evaluation: weights in evaluation mode: `soft` (noise-free, the default), `argmax`, or `sampled` as in training.
        zero_init: start from an exactly equal mix, instead of PyTorch's initial values.
        hidden: width of the selector's hidden layer; None: ⌊d/4⌋ where it reads the mean of a sequence and ⌊d/8⌋ where
            it runs for every token, which adds at most 5 % to a model's parameters and 10 % to its training step at
            width 128. The authors' code has ⌊d/2⌋.
        gate: `selector`, or `static` for weights that do not depend on the input (what `collapse_` makes of a gate that
            has settled on a mix); they are then in the buffer `static_weights`.
    """

    kind: Literal["autonorm"] = "autonorm"
    pool: Literal["token", "sequence"] = "token"
    tau: float = Field(default=1.0, gt=0)
    tau_end: float | None = Field(default=None, gt=0)
    hard: bool = True
    evaluation: Literal["soft", "argmax", "sampled"] = "soft"
    zero_init: bool = False
    hidden: int | None = Field(default=None, ge=1)
    gate: Literal["selector", "static"] = "selector"

    def check(self) -> None:
        """A static gate has no selector whose options could matter."""
        super().check()
        for name, value in (("tau", self.tau), ("tau_end", self.tau_end)):
            if value is not None and not 1e-6 <= value < math.inf:
                raise ValueError(f"{name}={value:g} lies beyond what float32 divides by; write a number from 1e-6 on")
        if self.gate == "static" and self.tau_end is not None:
            raise ValueError("gate='static' has no temperature to change; leave tau_end out")

    def hidden_width(self, width: int) -> int:
        """Width of the hidden layer of a selector over `width` channels."""
        return self.hidden or max(1, width // (4 if self.pool == "sequence" else 8))


@norms.register("autonorm")
class AutoNorm(MixtureNorm):
    """Σ_k w_k(x)·candidate_k(x), w from a two-layer selector through a Gumbel-Softmax (AutoNorm, arXiv 2607.10593).

    ℓ = W₂·relu(W₁·c + b₁) + b₂ with c the token or the mean of the valid tokens; x is (batch, …, d). In training w is a
    Gumbel-Softmax sample of ℓ. The noise-free weights, which count for entropy, record, evaluation and frozen gates,
    are softmax(ℓ) for hard samples, which are candidate k with just this probability at any τ, and softmax(ℓ/τ) for
    soft ones. Everything is float32 (float64 for float64) and rounded once.

    Parameters: `selector_in` (h, d), `selector_in_shift` (h,), `selector_out` (K, h), `selector_out_shift` (K,), none
    with `gate="static"`. Buffers, float32: `tau`; `noise` (1 sampled, 0 noise-free); `frozen` (1: no gradient reaches
    the selector); `static` (1: `static_weights` (K,) instead of the selector); and the record since the last step of a
    controller, in training only: `weight_sum` (K,), `entropy_sum`, `batches`.
    """

    Config = AutoNormConfig
    config: AutoNormConfig
    stochastic = True
    token_mask: Tensor | None = None
    tau: Tensor
    noise: Tensor
    frozen: Tensor
    static: Tensor
    static_weights: Tensor
    weight_sum: Tensor
    entropy_sum: Tensor
    batches: Tensor

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        count, hidden = len(self.candidates), self.config.hidden_width(width)
        fixed = self.config.gate == "static"
        if not fixed:
            self.selector_in = nn.Parameter(uniform_start((hidden, width)))
            self.selector_in_shift = nn.Parameter(uniform_start((hidden, width))[:, 0].clone())
            last = torch.zeros(count, hidden) if self.config.zero_init else uniform_start((count, hidden))
            shift = torch.zeros(count) if self.config.zero_init else uniform_start((count, hidden))[:, 0].clone()
            self.selector_out, self.selector_out_shift = nn.Parameter(last), nn.Parameter(shift)
        start = {"tau": self.config.tau, "noise": float(not fixed), "frozen": float(fixed), "static": float(fixed)}
        for name in STATE:
            wide = name in ("static_weights", "weight_sum")
            value = 1 / count if name == "static_weights" else start.get(name, 0.0)
            self.register_buffer(name, torch.full((count,), value) if wide else torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        if self.config.gate == "static":
            return self._mixed(x, self._evaluated(self.static_weights, None))
        logits = gate_logits(pool_tokens(x, self.config.pool, self.token_mask), self._selector())
        weights, entropy = gate_weights(logits, 1.0 if self.config.hard else self.tau)
        if not self.training:
            weights = torch.where(self.static > 0, self.static_weights.to(weights.dtype), weights)
            return self._mixed(x, self._evaluated(weights, logits))
        if torch.is_grad_enabled():
            self._record(weights.detach(), entropy.detach())
        weights = torch.where(self.frozen > 0, weights.detach(), weights)
        weights = torch.where(self.static > 0, self.static_weights.to(weights.dtype), weights)
        sampled = gumbel_weights(logits, torch.rand_like(logits), self.tau, self.config.hard)
        return self._mixed(x, torch.where(self.noise > 0, sampled, weights))

    def _selector(self) -> Selector:
        return Selector(self.selector_in, self.selector_in_shift, self.selector_out, self.selector_out_shift)

    def _evaluated(self, weights: Tensor, logits: Tensor | None) -> Tensor:
        """The weights of evaluation mode, made of the noise-free ones."""
        if self.config.evaluation == "argmax":
            return one_hot_maximum(weights)
        if self.config.evaluation == "soft" or logits is None:
            return weights
        sampled = gumbel_weights(logits, torch.rand_like(logits), self.tau, self.config.hard)
        return torch.where(self.noise > 0, sampled, weights)

    def _record(self, weights: Tensor, entropy: Tensor) -> None:
        with torch.no_grad():
            means = masked_mean(torch.cat((weights, entropy[..., None]), dim=-1), self.token_mask)
            self.weight_sum.add_(means[:-1])
            self.entropy_sum.add_(means[-1])
            self.batches.add_(1)

    def weights(self, x: Tensor) -> Tensor:
        """The noise-free weights for x, (…, K); axes that the gate pools over have length 1."""
        if self.config.gate == "static" or bool(self.static > 0):
            return self.static_weights
        logits = gate_logits(pool_tokens(x, self.config.pool, self.token_mask), self._selector())
        return gate_weights(logits, 1.0 if self.config.hard else self.tau)[0]

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64 with the weights of evaluation mode, noise-free."""
        if self.config.gate == "static" or bool(self.static > 0):
            weights = self.static_weights.double()
        else:
            pooled = pool_reference(x, self.config.pool, self.token_mask)
            weights = gate_reference(pooled, self._selector(), 1.0 if self.config.hard else float(self.tau))
        if self.config.evaluation == "argmax":
            weights = one_hot_maximum(weights)
        return mix_reference(weights, [candidate.reference(widen(x)) for candidate in self.candidates])  # pyright: ignore[reportCallIssue]

    def selector_parameters(self) -> list[nn.Parameter]:
        """The parameters that freezing the gate stops."""
        return list(self.parameters(recurse=False))
