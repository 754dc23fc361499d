"""What norms share whose gain and shift are generated from the tokens themselves."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from normsmith.norms.base import Norm, NormConfig
from normsmith.ops.gate import pool_reference, pool_tokens
from normsmith.ops.statistics import layer_norm_reference, widen, without_autocast


class ConditionedConfig(NormConfig):
    """`eps` inside the root; `pool` says what the generator sees: `token`, each token by itself (the default and the
    only safe one in causal models), or `sequence`, the mean of the sample's valid tokens.
    """

    eps: float = Field(default=1e-5, gt=0)
    pool: Literal["token", "sequence"] = "token"


class ConditionedNorm(Norm):
    """(1 + γ(c)) ⊙ (x − mean)/√(var + eps) + β(c), [γ(c), β(c)] = G·f(c) + g with G, g zero at the start.

    Parameters: `generator` (2d, d) is G, `generator_shift` (2d,) is g. x is (batch, …, d); `token_mask` (batch, …), 0
    for padding, is set by the model. Float32 (float64 for float64), rounded once.
    """

    Config = ConditionedConfig
    config: ConditionedConfig
    token_mask: Tensor | None = None
    activated: ClassVar[bool] = False  # f is SiLU, else the identity

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.generator = nn.Parameter(torch.zeros(2 * width, width))
        self.generator_shift = nn.Parameter(torch.zeros(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        wide = widen(x)
        with without_autocast(x):
            c = pool_tokens(wide, self.config.pool, self.token_mask)
            c = F.silu(c) if self.activated else c
            made = F.linear(c, self.generator.to(c.dtype), self.generator_shift.to(c.dtype))
            gain, shift = made.chunk(2, dim=-1)
            return ((1 + gain) * F.layer_norm(wide, x.shape[-1:], eps=self.config.eps) + shift).to(x.dtype)

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        c = pool_reference(x, self.config.pool, self.token_mask)
        c = c / (1 + torch.exp(-c)) if self.activated else c
        gain, shift = (c @ self.generator.double().T + self.generator_shift.double()).chunk(2, dim=-1)
        return (1 + gain) * layer_norm_reference(x, None, None, self.config.eps) + shift

    @classmethod
    def from_site(cls, old: nn.Module, width: int, config: NormConfig | None = None) -> Self:
        """Starts with the trained gain and shift, as those that the generator makes of any input."""
        new = super().from_site(old, width, config)
        if not isinstance(old, ConditionedNorm):
            tensors = {n: p.detach() for n, p in old.named_parameters(recurse=False) if p.shape == (width,)}
            gain, shift = tensors.get("gamma", tensors.get("weight")), tensors.get("beta", tensors.get("bias"))
            with torch.no_grad():
                if gain is not None:
                    new.generator_shift[:width].copy_(gain.to(new.generator_shift) - 1)
                if shift is not None:
                    new.generator_shift[width:].copy_(shift)
        return new
