"""Recognise a norm by what it computes: feed a copy of the module known weights and inputs, and compare."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from normsmith.norms import Norm

_EPS_RANGE = (1e-16, 1e-1)
_LARGEST = 2**16  # entries of a gain; larger parameters are weight matrices
_SOME_WIDTH = 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class NormFacts:
    """What a norm computes: y = (offset + weight) ⊙ n(x) + bias with n(x) = (x − mean) / √(mean square + eps).

    The mean is subtracted by a LayerNorm (`centred`) and not by an RMSNorm.
    `kind` is `layernorm` or `rmsnorm` for that formula, the registry name of any other normsmith norm, else `other`.
    `eps_position` is `inside` the root, `outside` (added to the root) or `floor` (the root is at least eps).
    `cast_first` says whether n(x) is rounded to the input's dtype before the weight multiplies; it matters in half
    precision only. `weight` and `bias` are the names of the parameters in the module, None without one. `gain_last`
    says whether these are applied last, y = gain ⊙ f(x) + shift, whatever f is.
    """

    kind: str
    shape: tuple[int, ...]
    eps: float | None = None
    eps_position: str = "inside"
    offset: float = 0.0
    cast_first: bool = False
    weight: str | None = None
    bias: str | None = None
    gain_last: bool = False

    @property
    def width(self) -> int:
        """Number of features that are normalised together, d; 0 if it cannot be read off the module."""
        return self.shape[-1] if self.shape else 0

    @property
    def centred(self) -> bool:
        """Whether the token's mean is subtracted."""
        return self.kind == "layernorm"

    @property
    def plain(self) -> bool:
        """Whether the module is a LayerNorm or RMSNorm in the usual form, so that another can take over exactly."""
        return self.kind in ("layernorm", "rmsnorm") and self.eps_position == "inside"

    def scale(self, module: nn.Module) -> Tensor | None:
        """The effective gain offset + weight in float64, or None for a norm without gain."""
        return None if self.weight is None else self.offset + getattr(module, self.weight).detach().double()

    def shift(self, module: nn.Module) -> Tensor | None:
        """The shift in float64, or None for a norm without one."""
        return None if self.bias is None else getattr(module, self.bias).detach().double()


def norm_facts(module: nn.Module, width: int | None = None) -> NormFacts | None:
    """Say which norm `module` is, or None if it is none.

    Classes that are known (normsmith's own, `nn.LayerNorm`, `nn.RMSNorm`) are read; any other module without children
    whose parameters are at most a gain and a shift is probed on a copy with random weights, so that modules on the meta
    device can be recognised too. What calls itself a norm and is neither LayerNorm nor RMSNorm is `other`.

    Args:
        module: any module.
        width: features of its input, for a module without parameters; default: read from its `normalized_shape`.
    """
    if isinstance(module, Norm):
        return _own(module)
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return _torch(cast("nn.LayerNorm | nn.RMSNorm", module))
    if type(module).__module__.startswith("torch.nn.modules") or any(True for _ in module.children()):
        return NormFacts("other", (module.num_channels,)) if isinstance(module, nn.GroupNorm) else None
    shape = _shape(module, width)
    found = None if shape is None else _probe(module, shape)
    called_norm = any("norm" in cls.__name__.lower() for cls in type(module).__mro__)
    return found or (NormFacts("other", shape or ()) if called_norm else None)


def _own(module: Norm) -> NormFacts:
    options = module.config.to_dict()
    names = {n: n if getattr(module, n, None) is not None else None for n in ("gamma", "beta")}
    return NormFacts(
        module.config.kind,
        (module.width,),
        options.get("eps"),
        cast_first=options.get("cast_first", False),
        weight=names["gamma"],
        bias=names["beta"],
        gain_last=module.gain_last,
    )


def _torch(module: nn.LayerNorm | nn.RMSNorm) -> NormFacts:
    shape = tuple(module.normalized_shape)
    if len(shape) != 1:
        return NormFacts("other", shape)
    eps = module.eps
    if eps is None:  # nn.RMSNorm's default: that of the dtype it computes in, float32 for narrower ones
        dtype = torch.get_default_dtype() if module.weight is None else module.weight.dtype
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return NormFacts(
        "layernorm" if isinstance(module, nn.LayerNorm) else "rmsnorm",
        shape,
        eps,
        weight=None if module.weight is None else "weight",
        bias=None if getattr(module, "bias", None) is None else "bias",
        gain_last=True,
    )


def _shape(module: nn.Module, width: int | None) -> tuple[int, ...] | None:
    shapes = {tuple(p.shape) for p in module.parameters(recurse=False)}
    if len(shapes) == 1 and len(shape := next(iter(shapes))) in (1, 2) and 0 < math.prod(shape) <= _LARGEST:
        return shape if sum(1 for _ in module.parameters(recurse=False)) <= 2 else None
    if not shapes:
        declared = getattr(module, "normalized_shape", None)
        width = int(declared[-1]) if isinstance(declared, tuple | list | torch.Size) and declared else width
        return (width,) if width else ()  # without one, such a module takes any width
    return None


def _copy(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of the module with its own random weights on the CPU, without hooks and without a replaced forward."""
    twin = copy.copy(module)
    generator = torch.Generator().manual_seed(len(list(module.parameters())))
    twin.__dict__ = {k: v for k, v in module.__dict__.items() if k not in ("forward", "_old_forward", "_hf_hook")}
    for name in _HOOKS:
        twin.__dict__[name] = OrderedDict()
    twin.__dict__["_parameters"] = {
        name: None
        if p is None
        else nn.Parameter((torch.rand(p.shape, generator=generator, dtype=torch.float32) + 0.5).to(dtype))
        for name, p in module.__dict__["_parameters"].items()
    }
    twin.__dict__["_buffers"] = {
        name: b if b is None or b.is_meta else b.detach().clone().cpu()
        for name, b in module.__dict__["_buffers"].items()
    }
    return twin.eval()


@torch.no_grad()
def _probe(module: nn.Module, shape: tuple[int, ...]) -> NormFacts | None:
    try:
        with torch.random.fork_rng(devices=[]):  # a forward pass may draw numbers, of dropout for instance
            twin = _copy(module)
            facts = _formula(twin, shape or (_SOME_WIDTH,))
            facts = None if facts is None else _epsilon(twin, facts)
            return None if facts is None else replace(facts, shape=shape, cast_first=_casts_first(module, facts))
    except Exception:  # whatever a module that is no norm raises on such inputs
        return None


def _inputs(shape: tuple[int, ...], size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, *shape, generator=generator, dtype=torch.float32) + 0.7  # a mean, so that centring shows
    return size * x


def _normalized(x: Tensor, facts: NormFacts) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if facts.centred else x
    square, eps = x.square().mean(-1, keepdim=True), facts.eps or 0.0
    if facts.eps_position == "inside":
        return x / (square + eps).sqrt()
    root = square.sqrt()
    return x / (root + eps if facts.eps_position == "outside" else root.clamp_min(eps))


def _call(module: nn.Module, x: Tensor) -> Tensor:
    out = module(x)
    if not isinstance(out, Tensor) or out.shape != x.shape:
        raise TypeError("not a norm")
    return out.double()


def _formula(twin: nn.Module, shape: tuple[int, ...]) -> NormFacts | None:
    """The kind and the convention of the weights, on inputs so large that eps does not matter."""
    x = _inputs(shape, 100.0)
    y = _call(twin, x)
    params = {name: p.double() for name, p in twin.named_parameters(recurse=False)}
    options: list[tuple[str | None, str | None]] = [(None, None), *((w, None) for w in params)]
    options += [(w, b) for w in params for b in params if w != b]
    for kind in ("layernorm", "rmsnorm"):
        facts = NormFacts(kind, shape)
        n = _normalized(x, facts)
        for weight, bias in options:
            for offset in (0.0, 1.0) if weight else (0.0,):
                expected = n if weight is None else n * (offset + params[weight])
                expected = expected if bias is None else expected + params[bias]
                if len(params) == (weight is not None) + (bias is not None) and _close(y, expected, 1e-4):
                    return replace(facts, offset=offset, weight=weight, bias=bias, gain_last=True)
    return None


def _close(y: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((y - expected).abs().max()) <= tolerance * float(expected.abs().max())


def _epsilon(twin: nn.Module, facts: NormFacts) -> NormFacts | None:
    """Find eps and where it stands from small inputs, whose statistics it dominates."""
    if facts.bias is not None:
        getattr(twin, facts.bias).zero_()  # beside it, small outputs would be rounded away
    declared = [v for v in vars(twin).values() if isinstance(v, float) and _EPS_RANGE[0] < v < _EPS_RANGE[1]]
    measured: list[tuple[str, float]] = []
    for position, size in (("inside", 1e-7), ("outside", 1e-9), ("floor", 1e-9)):
        x = _inputs(facts.shape, size)
        n = _plain_output(twin, facts, x)
        x = x.double() - x.double().mean(-1, keepdim=True) if facts.centred else x.double()
        if not bool(((x * n).sum(-1) > 0).all()):
            continue
        divisor, square = (x * x).sum(-1) / (x * n).sum(-1), x.square().mean(-1)  # of each token
        values = {"inside": divisor**2 - square, "outside": divisor - square.sqrt(), "floor": divisor}[position]
        value = float(values.mean())
        rounded = float(f"{value:.3g}")  # nobody writes more digits, and float32 does not measure them
        measured += [(position, rounded if abs(rounded - value) < 1e-4 * value else value)] if value > 0 else []
    for position, value in [(p, d) for p in ("inside", "outside", "floor") for d in declared] + measured:
        candidate = replace(facts, eps=value, eps_position=position)
        sizes = (value**0.5, 0.1 * value**0.5, 3 * value**0.5) if position == "inside" else (value, 0.3 * value)
        if all(
            _close(_plain_output(twin, facts, x), _normalized(x, candidate), 1e-3)
            for x in (_inputs(facts.shape, size) for size in (*sizes, 1e-3, 1.0))
        ):
            return candidate
    plain = replace(facts, eps=0.0)
    small = _inputs(facts.shape, 1e-6)
    return plain if _close(_plain_output(twin, facts, small), _normalized(small, plain), 1e-3) else None


def _plain_output(twin: nn.Module, facts: NormFacts, x: Tensor) -> Tensor:
    """The module's output with gain and shift taken off."""
    y = _call(twin, x)
    shift, scale = facts.shift(twin), facts.scale(twin)
    y = y if shift is None else y - shift
    return y if scale is None else y / scale


def _casts_first(module: nn.Module, facts: NormFacts) -> bool:
    """Whether bfloat16 outputs are those of rounding before the gain multiplies; also if both orders give the same."""
    if facts.weight is None:
        return False
    twin = _copy(module, torch.bfloat16)
    x = _inputs(facts.shape).to(torch.bfloat16)
    y = twin(x).double()
    n, scale = _normalized(x.float(), facts), cast("Tensor", facts.scale(twin))
    shift = facts.shift(twin)
    last = n * scale if shift is None else n * scale + shift
    first = n.to(torch.bfloat16).double() * scale
    first = first if shift is None else first + shift
    errors = [float((y - z.to(torch.bfloat16).double()).abs().sum()) for z in (first, last)]
    return errors[0] < errors[1]
