"""No norm at all."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from normsmith.norms.base import LinearForm, Norm, NormConfig, norms


class IdentityConfig(NormConfig):
    """`identity` has no options."""

    kind: Literal["identity"] = "identity"


@norms.register("identity")
class Identity(Norm):
    """x. The model built with it is the norm-free twin that a folded model is measured against."""

    Config = IdentityConfig

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → (…, d), the same tensor."""
        return x

    def reference(self, x: Tensor) -> Tensor:
        """The formula in float64."""
        return x.double()

    def linear_form(self) -> LinearForm:
        """y = x."""
        return LinearForm(torch.ones((), dtype=torch.float64), None, centred=False)
