"""The norms: one file each, one line here."""

from normsmith.norms import dyt, identity, layernorm, rmsnorm, scalenorm, tapered
from normsmith.norms.base import LinearForm, Norm, NormConfig, create_norm, norm_config, norms

__all__ = [
    "LinearForm",
    "Norm",
    "NormConfig",
    "create_norm",
    "dyt",
    "identity",
    "layernorm",
    "norm_config",
    "norms",
    "rmsnorm",
    "scalenorm",
    "tapered",
]
