"""FakeLN: a norm that turns from one optimiser step to the next into a division by a constant.

    ((x − mean)/σ(x)) ⊙ γ + β  →  ((x − mean)/σ_avg) ⊙ γ + β

σ_avg is a running mean of σ over tokens, frozen when the norm turns fake. While the first-position exception is on, the
first token of a sequence is divided by a mean of its own, σ_first, and while the end-of-text exception is on, so are
end-of-text tokens on the way to the values of attention. The RMS form has no mean and no β.
Source: Baroni et al. 2025 (arXiv 2507.02559).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from normsmith.norms.base import LinearForm, Norm, NormConfig, norms
from normsmith.ops.statistics import centre, inverse_rms, widen
from normsmith.ops.taper import token_mean


class FakeConfig(NormConfig):
    """What both fake norms share: `eps` inside the root."""

    eps: float = Field(default=1e-6, gt=0)


class FakeRMSNormConfig(FakeConfig):
    """Options of `fakeln_rms`: those of `rmsnorm`."""

    kind: Literal["fakeln_rms"] = "fakeln_rms"
    cast_first: bool = False


class FakeLayerNormConfig(FakeConfig):
    """Options of `fakeln`: those of `layernorm`."""

    kind: Literal["fakeln"] = "fakeln"
    eps: float = Field(default=1e-5, gt=0)
    bias: bool = True


class FakeNorm(Norm):
    """x̄/D ⊙ γ + β with x̄ = x − mean (RMS form: x), and D the token's σ before, a constant once the norm is fake.

    Where queries and keys are removed apart from values (`split`, set with the hooks on the readers), the output is
    that for the values, and `ratio` (…, 1) is what their part of it must be multiplied by for queries and keys.

    Parameters: `gamma` (d,), and `beta` (d,) or None. Buffers, all 0-dim: `fake` and `fake_qk` (0 or 1) say which use
    is fake, `sigma` and `sigma_qk` are its σ_avg, `sigma_first` is σ_first; `keep_first` and `keep_end` (0 or 1) are
    the exceptions. `sum_sigma`, `sum_first` and `batches` collect σ in training; the controller empties them once per
    optimiser step. `token_mask`, `first_tokens` and `end_tokens` (…), 1 for real, first and end-of-text tokens, are set
    by the controller; without them the first token is that at index 0 of the last axis but one.
    """

    config: FakeConfig
    cast_first = False
    split = False
    _hooked = False  # whether the readers' hooks are there; a copy in a saved folder has none
    token_mask: Tensor | None = None
    first_tokens: Tensor | None = None
    end_tokens: Tensor | None = None
    ratio: Tensor | None = None
    fake: Tensor
    fake_qk: Tensor
    sigma: Tensor
    sigma_qk: Tensor
    sigma_first: Tensor
    keep_first: Tensor
    keep_end: Tensor
    sum_sigma: Tensor
    sum_first: Tensor
    batches: Tensor
    beta: nn.Parameter | None

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.gamma = nn.Parameter(torch.ones(width))
        self.register_parameter("beta", None)
        for name, value in FAKE_STATE.items():
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        if self.split and not self._hooked and not self._settled():
            raise RuntimeError(
                "this model was saved while its norms were being removed, when queries and keys are scaled apart from "
                "values by hooks that no folder holds; load the model of the end, or continue its training run"
            )
        wide = centre(widen(x)) if self.centred else widen(x)
        inverse = inverse_rms(wide, self.config.eps)
        first = self._flags(self.first_tokens, x)
        if first is None:  # a single vector has no place in a sequence
            places = torch.arange(x.shape[-2], device=x.device) if x.ndim > 1 else torch.ones((), device=x.device)
            first = places == 0
        apart = first[..., None] & (self.keep_first != 0)
        end = self._flags(self.end_tokens, x)
        special = apart if end is None else apart | (end[..., None] & (self.keep_end != 0))
        used = self._inverse(inverse, self.fake, self.sigma, special)
        if self.split:
            self.ratio = self._inverse(inverse, self.fake_qk, self.sigma_qk, apart) / used
        if self.training and torch.is_grad_enabled():
            self._collect(inverse, first)
        y = wide * used
        y = (y.to(x.dtype) if self.cast_first else y) * self.gamma.to(x.dtype if self.cast_first else y.dtype)
        return (y if self.beta is None else y + self.beta.to(y.dtype)).to(x.dtype)

    def _inverse(self, real: Tensor, fake: Tensor, sigma: Tensor, special: Tensor) -> Tensor:
        """1/D, (…, 1)."""
        divisor = torch.where(special, self.sigma_first, sigma).to(real.dtype)
        return torch.where(fake != 0, 1 / divisor, real)

    def _flags(self, flags: Tensor | None, x: Tensor) -> Tensor | None:
        if flags is None or flags.shape == x.shape[:-1]:
            return flags
        flattened = x.ndim == 2 and flags.numel() == x.shape[0]  # as OPT does before its MLPs
        return flags.reshape(x.shape[:-1]) if flattened else None

    @torch.no_grad()
    def _collect(self, inverse: Tensor, first: Tensor) -> None:
        sigma = 1 / inverse.squeeze(-1)
        first = first.expand(sigma.shape)
        mask = self._flags(self.token_mask, sigma[..., None])
        real = torch.ones_like(first) if mask is None else mask != 0
        self.sum_sigma.add_(token_mean(sigma, real & ~first))
        self.sum_first.add_(token_mean(sigma, real & first))
        self.batches.add_(1)

    def _settled(self) -> bool:
        """Whether every use is the same constant for every token; waits for the device."""
        state = [float(t) for t in (self.fake, self.fake_qk, self.keep_first, self.keep_end, self.sigma, self.sigma_qk)]
        uses_agree = not self.split or (state[1] == 1 and state[4] == state[5])
        return state[0] == 1 and state[2] == state[3] == 0 and uses_agree

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64, of the output for the values where the uses are apart."""
        x = x.double()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        divisor = torch.sqrt((x**2).mean(-1) + self.config.eps)
        if float(self.fake) == 1:
            divisor = torch.full_like(divisor, float(self.sigma))
            if float(self.keep_first) == 1 and self.first_tokens is None and x.ndim > 1:
                divisor[..., 0] = float(self.sigma_first)
            for flags, kept in ((self.first_tokens, self.keep_first), (self.end_tokens, self.keep_end)):
                if flags is not None and float(kept) == 1:
                    divisor[flags.reshape(divisor.shape)] = float(self.sigma_first)
        y = x / divisor[..., None] * self.gamma.double()
        return y if self.beta is None else y + self.beta.double()

    def linear_form(self) -> LinearForm | None:
        """γ/σ_avg ⊙ x + β (x centred in the LayerNorm form) once every use is fake and no exception is left."""
        if not self._settled():
            return None
        scale = self.gamma.detach().double() / self.sigma.double()
        return LinearForm(scale, None if self.beta is None else self.beta.detach().double(), self.centred)

    def __getstate__(self) -> dict[str, Any]:
        # Part of a graph, which can be neither copied nor stored, and of a batch.
        return {k: v for k, v in self.__dict__.items() if k not in _OF_A_BATCH}


# Real at first, with σ_avg 1 until it is known; sums and the count of batches at 0.
FAKE_STATE = {
    **{"fake": 0.0, "fake_qk": 0.0, "sigma": 1.0, "sigma_qk": 1.0, "sigma_first": 1.0},
    **{"keep_first": 0.0, "keep_end": 0.0, "sum_sigma": 0.0, "sum_first": 0.0, "batches": 0.0},
}
_OF_A_BATCH = ("ratio", "token_mask", "first_tokens", "end_tokens")


@norms.register("fakeln_rms")
class FakeRMSNorm(FakeNorm):
    """x/√(mean(x²) + eps) ⊙ γ, then x/σ_avg ⊙ γ: FakeLN (arXiv 2507.02559) for models with RMSNorm."""

    Config = FakeRMSNormConfig
    config: FakeRMSNormConfig

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.cast_first = self.config.cast_first


@norms.register("fakeln")
class FakeLayerNorm(FakeNorm):
    """(x − mean)/σ ⊙ γ + β, then (x − mean)/σ_avg ⊙ γ + β (FakeLN, arXiv 2507.02559)."""

    Config = FakeLayerNormConfig
    config: FakeLayerNormConfig
    centred = True

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        if self.config.bias:
            self.beta = nn.Parameter(torch.zeros(width))
