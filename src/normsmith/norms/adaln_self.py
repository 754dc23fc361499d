"""DiT's adaptive LayerNorm, conditioned on the tokens themselves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normsmith.norms.base import norms
from normsmith.norms.conditioned import ConditionedConfig, ConditionedNorm


class AdaLNSelfConfig(ConditionedConfig):
    """Options of `adaln_self`: `eps`, and `pool` for what the generator sees, as in `autonorm`."""

    kind: Literal["adaln_self"] = "adaln_self"
    eps: float = Field(default=1e-6, gt=0)


@norms.register("adaln_self")
class AdaLNSelf(ConditionedNorm):
    """(1 + scale(c)) ⊙ (x − mean)/√(var + eps) + shift(c), [scale, shift] = G·silu(c) + g (adaLN of DiT, arXiv
    2212.09748, without its gate on the sublayer); c is the token itself, or the mean of the valid tokens.
    """

    Config = AdaLNSelfConfig
    config: AdaLNSelfConfig
    activated = True
