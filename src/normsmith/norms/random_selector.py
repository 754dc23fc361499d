"""A mixture of norms with random weights, the control for a learned gate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from normsmith.norms.base import norms
from normsmith.norms.mixture import MixtureConfig, MixtureNorm
from normsmith.ops.gate import mix_reference
from normsmith.ops.statistics import widen


class RandomSelectorConfig(MixtureConfig):
    """Options of `random_selector`: `candidates` as in `autonorm`; `evaluation` is `mean` (equal weights, the default)
    or `sampled` (random ones as in training, as the published number was made).
    """

    kind: Literal["random_selector"] = "random_selector"
    evaluation: Literal["mean", "sampled"] = "mean"


@norms.register("random_selector")
class RandomSelector(MixtureNorm):
    """Σ_k w_k·candidate_k(x), w drawn anew for each sample at each call: u and 1 − u with u uniform for two candidates,
    uniform among all weights that add up to 1 for more (AutoNorm, arXiv 2607.10593). Axis 0 counts the samples.
    """

    Config = RandomSelectorConfig
    config: RandomSelectorConfig
    stochastic = True

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d)."""
        count = len(self.candidates)
        if not self.training and self.config.evaluation == "mean":
            return self._mixed(x, torch.full((count,), 1 / count, dtype=widen(x).dtype, device=x.device))
        shape = (*x.shape[: x.ndim > 1], *[1] * (x.ndim - 2), count)
        draws = -torch.log1p(-torch.rand(shape, dtype=widen(x).dtype, device=x.device))
        # Exponentials divided by their sum are uniform on the simplex; the tiny number is for a draw of zeros only.
        return self._mixed(x, (draws + 1e-30) / (draws + 1e-30).sum(-1, keepdim=True))

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64 with equal weights, the mean of the random ones."""
        outputs = [candidate.reference(widen(x)) for candidate in self.candidates]  # pyright: ignore[reportCallIssue]
        return mix_reference(torch.full((len(outputs),), 1 / len(outputs), device=x.device), outputs)
