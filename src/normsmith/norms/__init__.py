"""The norms: one file each, one line here."""

from normsmith.norms import (
    adaln_self,
    adanorm,
    autonorm,
    derf,
    dyt,
    fakeln,
    film,
    frozen_ln,
    identity,
    layernorm,
    random_selector,
    rmsnorm,
    scalenorm,
    tapered,
)
from normsmith.norms.base import LinearForm, Norm, NormConfig, create_norm, norm_config, norms

__all__ = [
    "LinearForm",
    "Norm",
    "NormConfig",
    "adaln_self",
    "adanorm",
    "autonorm",
    "create_norm",
    "derf",
    "dyt",
    "fakeln",
    "film",
    "frozen_ln",
    "identity",
    "layernorm",
    "norm_config",
    "norms",
    "random_selector",
    "rmsnorm",
    "scalenorm",
    "tapered",
]
