"""FiLM behind a plain LayerNorm."""

from __future__ import annotations

from typing import Literal

from normsmith.norms.base import norms
from normsmith.norms.conditioned import ConditionedConfig, ConditionedNorm


class FiLMConfig(ConditionedConfig):
    """Options of `film`: `eps`, and `pool` for what the generator sees, as in `autonorm`."""

    kind: Literal["film"] = "film"


@norms.register("film")
class FiLM(ConditionedNorm):
    """γ(c) ⊙ (x − mean)/√(var + eps) + β(c), γ = 1 + Δγ, [Δγ, β] = G·c + g (Perez et al., arXiv 1709.07871).

    The layer needs a condition, which these tasks have not: c is the token itself, or the mean of the valid tokens.
    """

    Config = FiLMConfig
    config: FiLMConfig
