"""What a sublayer's output goes through before it joins the stream: LayerScale, dropout, stochastic depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from normsmith.models.config import NormsmithConfig


class Fresh(nn.Module):
    """A module that sets its own initial weights; `deviation` is the model's `initializer_range`."""

    biases_by_row: tuple[str, ...] = ()
    """Parameters that are biases, so weight decay leaves them alone, though they are matrices (one bias per row)."""

    def initialise(self, deviation: float) -> None:
        """Set the initial values in place, through transformers' functions, which leave loaded weights alone."""
        raise NotImplementedError(f"{type(self).__name__} must define initialise(deviation)")


class Branch(Fresh):
    """drop_path(dropout(γ ⊙ out)), (batch, time, d) → the same.

    γ starts at `layer_scale` (LayerScale, arXiv 2103.17239). Stochastic depth (arXiv 1603.09382) zeroes a sample's
    whole output with probability p and divides the others by 1 − p, so that the mean is kept; in training only.
    """

    def __init__(self, width: int, layer_scale: float | None, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.layer_scale, self.dropout, self.drop_path = layer_scale, dropout, drop_path
        self.gamma = None if layer_scale is None else nn.Parameter(torch.full((width,), layer_scale))

    def initialise(self, deviation: float) -> None:
        """γ = layer_scale."""
        if self.gamma is not None and self.layer_scale is not None:
            init.constant_(self.gamma, self.layer_scale)

    def forward(self, out: Tensor) -> Tensor:
        """(batch, time, d) → (batch, time, d)."""
        if self.gamma is not None:
            out = out * self.gamma
        out = F.dropout(out, self.dropout, self.training)
        if self.drop_path and self.training:
            keep = 1 - self.drop_path
            shape = (out.shape[0], *(1 for _ in out.shape[1:]))
            out = out * (torch.rand(shape, device=out.device) < keep).to(out.dtype) / keep
        return out

    def extra_repr(self) -> str:
        """Options, for `print(model)`."""
        return f"layer_scale={self.layer_scale}, dropout={self.dropout}, drop_path={self.drop_path:.3g}"


def make_branch(config: NormsmithConfig, layer: int) -> Branch | None:
    """The branch of both sublayers of block `layer` (from 0), or None where it would do nothing."""
    drop_path = config.drop_path * layer / max(config.num_hidden_layers - 1, 1)
    if config.layer_scale is None and not config.dropout and not drop_path:
        return None
    return Branch(config.hidden_size, config.layer_scale, config.dropout, drop_path)
