"""The contract every norm keeps, and the registry that makes it usable by name."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from normsmith.config import Config
from normsmith.errors import ConfigError, InputError
from normsmith.registry import Registry


class NormConfig(Config):
    """Base of norm configurations; `kind` is the registry name."""

    kind: str


class LinearForm(NamedTuple):
    """y = scale ⊙ (x − mean(x) if centred else x) + shift; scale is (d,) or 0-dim, shift (d,) or None, float64."""

    scale: Tensor
    shift: Tensor | None
    centred: bool

    def apply(self, x: Tensor) -> Tensor:
        """The linear map itself, (…, d) → (…, d) in float64."""
        x = x.double()
        x = self.scale * (x - x.mean(-1, keepdim=True) if self.centred else x)
        return x if self.shift is None else x + self.shift


class Stateful(nn.Module):
    """A module whose buffers keep their dtype when the model's changes, as gates, scales, sums and moments must."""

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # `model.bfloat16()` must not round them: buffers follow the device, not the dtype.
        kept = {name: old for name, old in self._buffers.items() if old is not None}
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = cast("Tensor", self._buffers[name])
            self._buffers[name] = new.to(old.dtype) if old.is_meta or new.is_meta else old.to(new.device)
        return self


class Norm(Stateful):
    """A module (…, d) → (…, d) standing where LayerNorm or RMSNorm would stand.

    `forward` keeps shape and dtype and computes statistics in float32. Parameters are called `alpha, gamma, beta`,
    never `weight` or `bias`, which a stock loader would silently read as those of a LayerNorm. Whatever a schedule
    changes is a 0-dim tensor in a buffer, so that one compilation serves the whole training and checkpoints carry it;
    buffers keep their dtype when the model's changes.
    """

    kind: ClassVar[str]  # the registry name, set by registration
    Config: ClassVar[type[NormConfig]] = NormConfig
    centred: ClassVar[bool] = False  # whether the token's mean is subtracted first
    gain_last: ClassVar[bool] = False  # whether it ends with ⊙ gamma + beta, so that these can move into the readers
    stochastic: ClassVar[bool] = False  # whether it draws random numbers in training mode

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__()
        if width < 1:
            raise InputError(f"{type(self).__name__}: width must be at least 1, got {width}")
        self.width = width
        self.config = type(self).Config(**{"kind": self.kind, **options}) if config is None else config

    def reference(self, x: Tensor) -> Tensor:
        """The norm's formula in float64, written literally; `forward` is tested against it."""
        raise NotImplementedError(f"{type(self).__name__} must define reference(x)")

    def linear_form(self) -> LinearForm | None:
        """The linear map this norm is right now, or None while it depends on the token's statistics."""
        return None

    @classmethod
    def from_site(cls, old: nn.Module, width: int, config: NormConfig | None = None) -> Self:
        """A norm that starts from the trained `old`, so that the model's function changes least.

        Every parameter and buffer that both have under one name and shape is taken over (`nn.LayerNorm` and
        `nn.RMSNorm` call γ and β `weight` and `bias`): parameters as the same objects, so that an optimiser made before
        goes on training them. Device, dtype, train or eval mode are kept, and without a `config` the shared options.
        """
        tensors = _tensors(old)
        new = cls(width, shared_options(cls, old) if config is None else config)
        example = next(iter(tensors.values()), None)
        if example is not None:
            new.to(device=example.device, dtype=example.dtype)
        for name, ours in _tensors(new).items():
            theirs = tensors.get(name)
            if theirs is None or theirs.shape != ours.shape:
                continue
            if isinstance(theirs, nn.Parameter):
                setattr(new, name, theirs)
            else:
                with torch.no_grad():
                    ours.copy_(theirs)
        return new.train(old.training)

    def match(self, x: Tensor, y: Tensor) -> None:
        """Fit what this norm has of its own so that self(x) comes closest to y, the old norm's output; x, y (…, d).

        Called after `from_site`. A norm that computes the same as the old one, or has nothing to fit, does nothing.
        """

    def extra_repr(self) -> str:
        """Width and options, for `print(model)`."""
        options = {key: value for key, value in self.config.to_dict().items() if key != "kind"}
        return ", ".join([str(self.width), *(f"{key}={value}" for key, value in options.items())])


_FOREIGN = {"weight": "gamma", "bias": "beta"}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    found = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return found if isinstance(module, Norm) else {_FOREIGN.get(name, name): t for name, t in found.items()}


def shared_options(cls: type[Norm], old: nn.Module) -> NormConfig:
    """The configuration of `cls` with the options that `old` has too."""
    eps = getattr(old, "eps", None)
    options = old.config.to_dict() if isinstance(old, Norm) else {} if eps is None else {"eps": eps}
    shared = {k: v for k, v in options.items() if k in cls.Config.model_fields and _takes(cls, k, v)}
    return cls.Config(**{**shared, "kind": cls.kind})


def _takes(cls: type[Norm], option: str, value: Any) -> bool:
    # Two norms may have an option of one name with different values.
    try:
        cls.Config(**{"kind": cls.kind, option: value})
    except ConfigError:
        return False
    return True


norms: Registry[type[Norm]] = Registry("norm")


def norm_config(spec: str | dict[str, Any] | Config, **options: Any) -> NormConfig:
    """The validated configuration for a name, a mapping with `kind`, or a configuration."""
    return cast("NormConfig", norms.config(spec, **options))


def create_norm(spec: str | dict[str, Any] | Config, width: int, **options: Any) -> Norm:
    """Make the norm named or described by `spec` for tensors whose last axis has `width` entries.

    >>> create_norm("rmsnorm", 64, eps=1e-6)(torch.randn(2, 8, 64)).shape
    torch.Size([2, 8, 64])
    """
    config = norm_config(spec, **options)
    return norms.get(config.kind)(width, config)
