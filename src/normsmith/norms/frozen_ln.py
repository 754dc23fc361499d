"""Static LayerNorm, the baseline of a learned gate."""

from __future__ import annotations

from typing import Any, Literal, Self

from torch import nn

from normsmith.norms.base import NormConfig, norms
from normsmith.norms.layernorm import LayerNorm, LayerNormConfig


class FrozenLNConfig(LayerNormConfig):
    """Options of `frozen_ln`: those of `layernorm`; `affine_frozen` also stops the training of γ and β."""

    kind: Literal["frozen_ln"] = "frozen_ln"  # pyright: ignore[reportIncompatibleVariableOverride]
    affine_frozen: bool = False


@norms.register("frozen_ln")
class FrozenLN(LayerNorm):
    """(x − mean) / √(var + eps) ⊙ γ + β at every step: the norm choice is frozen, γ and β train (AutoNorm, arXiv
    2607.10593). With `affine_frozen` γ and β keep their values too.
    """

    Config = FrozenLNConfig
    config: FrozenLNConfig

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.requires_grad_(not self.config.affine_frozen)

    @classmethod
    def from_site(cls, old: nn.Module, width: int, config: NormConfig | None = None) -> Self:
        """The old norm's γ and β as the same parameters, as copies where they shall not train."""
        new = super().from_site(old, width, config)
        if new.config.affine_frozen and not isinstance(old, FrozenLN):
            for name, parameter in list(new.named_parameters()):
                setattr(new, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
        return new
