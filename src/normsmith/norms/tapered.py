"""The tapered norms: RMSNorm or LayerNorm that a gate turns into one fixed scaling."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import LinearForm, Norm, NormConfig, norms
from normsmith.ops.taper import TaperState, fixed_scaling, taper, taper_moments, taper_reference


class TaperedConfig(NormConfig):
    """What both tapered norms share: `eps` inside the root."""

    eps: float = Field(default=1e-6, gt=0)


class TaperedRMSNormConfig(TaperedConfig):
    """Options of `tapered_rmsnorm`: those of `rmsnorm`."""

    kind: Literal["tapered_rmsnorm"] = "tapered_rmsnorm"
    cast_first: bool = False


class TaperedLayerNormConfig(TaperedConfig):
    """Options of `tapered_layernorm`: those of `layernorm`."""

    kind: Literal["tapered_layernorm"] = "tapered_layernorm"
    eps: float = Field(default=1e-5, gt=0)
    bias: bool = True


class TaperedNorm(Norm):
    """g·(x/s) ⊙ γ + (1 − g)·c·x ⊙ γ̃ + β; see `normsmith.ops.taper` for the formula and its source.

    Parameters: `gamma`, `gamma_tilde` (d,), and `beta` (d,) or None. Buffers, all 0-dim: `gate` is g in training and
    `gate_eval` in evaluation; `scale` is c; `sum_scaled`, `sum_power` and `batches` collect the moments that c is
    fitted to, in training mode only, and are emptied by the controller once per optimiser step. Tokens that
    `token_mask` (…), set by the controller, calls padding do not count.
    """

    config: TaperedConfig
    cast_first = False
    token_mask: Tensor | None = None
    gate: Tensor
    gate_eval: Tensor
    scale: Tensor
    sum_scaled: Tensor
    sum_power: Tensor
    batches: Tensor
    beta: nn.Parameter | None

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.gamma = nn.Parameter(torch.ones(width))
        self.gamma_tilde = nn.Parameter(torch.ones(width))
        self.register_parameter("beta", None)
        for name, value in _BUFFERS.items():
            self.register_buffer(name, torch.tensor(value))

    def _state(self) -> TaperState:
        gate = self.gate if self.training else self.gate_eval
        return TaperState(
            self.gamma, self.gamma_tilde, self.beta, gate, self.scale, self.config.eps, self.centred, self.cast_first
        )

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        if self._is_fixed():
            return fixed_scaling(x, self._state())
        y, inverse, wide = taper(x, self._state())
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                scaled, power = taper_moments(wide, inverse, self.gamma, self.token_mask)
                self.sum_scaled.add_(scaled)
                self.sum_power.add_(power)
                self.batches.add_(1)
        return y

    def _is_fixed(self) -> bool:
        # Only where reading the gate neither waits for a device nor breaks a graph, and where γ needs no gradient:
        # decoding in eager mode on a CPU, which is all overhead.
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.gate.device.type != "cpu":
            return False
        return float(self.gate if self.training else self.gate_eval) == 0

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        return taper_reference(x, self._state())

    def linear_form(self) -> LinearForm | None:
        """c·γ̃ ⊙ x + β once the gate is 0 (x centred for LayerNorm), None before."""
        if float(self.gate) != 0 or float(self.gate_eval) != 0:
            return None
        scale = self.scale.detach().double() * self.gamma_tilde.detach().double()
        shift = None if self.beta is None else self.beta.detach().double()
        return LinearForm(scale, shift, self.centred)


# The gate starts at 1 and c at 1; sums and the count of batches at 0.
_BUFFERS = {"gate": 1.0, "gate_eval": 1.0, "scale": 1.0, "sum_scaled": 0.0, "sum_power": 0.0, "batches": 0.0}


@norms.register("tapered_rmsnorm")
class TaperedRMSNorm(TaperedNorm):
    """g·x/√(mean(x²) + eps) ⊙ γ + (1 − g)·c·x ⊙ γ̃ (TaperNorm, arXiv 2602.10408)."""

    Config = TaperedRMSNormConfig
    config: TaperedRMSNormConfig

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.cast_first = self.config.cast_first


@norms.register("tapered_layernorm")
class TaperedLayerNorm(TaperedNorm):
    """g·(x − mean)/σ ⊙ γ + (1 − g)·c·(x − mean) ⊙ γ̃ + β (TaperNorm, arXiv 2602.10408, appendix B)."""

    Config = TaperedLayerNormConfig
    config: TaperedLayerNormConfig
    centred = True

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        if self.config.bias:
            self.beta = nn.Parameter(torch.zeros(width))
