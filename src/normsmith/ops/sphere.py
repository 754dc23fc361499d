"""The p-family of retractions on the sphere of radius r: h′ = a·h + b·v with v in the tangent space at h.

With P = F − (⟨h,F⟩/⟨h,h⟩)·h, v = s·P, β = ‖v‖/r and θ = p·arctan(β/p) the member p moves h by the angle θ towards v:
a = cos θ and b = sin θ / β. p = 1 is the normalised sum (gnomonic projection), p = 2 the Cayley transform, p → ∞ the
exponential map. For finite closed forms a and b are rational in β², so nothing divides by ‖v‖ and v = 0 is harmless.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_TINY = 1e-10  # a shorter vector (the zero embedding of a padding token) counts as 1e-5 long, as in ScaleNorm
_CLOSED = (1, 2, 4)  # members with rational coefficients, for which a hand-written backward exists


def sphere_update_reference(
    h: Tensor,
    out: Tensor,
    step: Tensor,
    radius: Tensor | float,
    p: float | Tensor,
    rescale: bool,
    clamp: float | None = None,
) -> Tensor:
    """The retraction in float64 as it is written, with trigonometry; slow, for tests. Arguments as `sphere_update`."""
    h, out, step = h.double(), out.double(), step.double()
    out, step = (out, step) if step.ndim == 0 else (step * out, torch.ones_like(step[0]))
    radius = radius.double() if isinstance(radius, Tensor) else radius
    tangent = out - (h * out).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    length = tangent.norm(dim=-1, keepdim=True)
    direction = tangent / torch.where(length > 0, length, 1.0)
    beta = step * (length / radius if clamp is None else (length / radius).clamp_max(clamp))
    beta = beta if clamp is None else beta.clamp(-clamp, clamp)
    theta = beta if _is_exponential(p) else p * torch.atan(beta / p)
    new = theta.cos() * h + theta.sin() * radius * direction
    return new * radius / new.norm(dim=-1, keepdim=True) if rescale else new


def sphere_coefficients(beta2: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return (a, b) = (cos θ, sin θ / β) for θ = p·arctan(β/p) from β² alone.

    Args:
        beta2: β² ≥ 0 of any shape, floating point.
        p: member of the family, p > 0 or `math.inf`. p in {1, 2, 4} is rational in β² (p = 1: in √(1+β²)). A 0-dim
            tensor takes the general formula, whose gradient for p is finite, also at β = 0.
    """
    if isinstance(p, Tensor):
        return _trigonometric(beta2, p)
    if p == 1:
        a = torch.rsqrt(1 + beta2)
        return a, a
    if p == 2:
        t = beta2 / 4
        b = 1 / (1 + t)
        return (1 - t) * b, b
    if p == 4:
        u = beta2 / 16
        c = (1 + u).square().reciprocal()
        return (1 - 6 * u + u * u) * c, (1 - u) * c
    return _trigonometric(beta2, p)


def _is_exponential(p: float | Tensor) -> bool:
    return not isinstance(p, Tensor) and p == math.inf  # math.isinf breaks a compiled graph


def _trigonometric(x: Tensor, p: float | Tensor) -> tuple[Tensor, Tensor]:
    # Below the threshold the series in x = β² is exact to float64; above it β is far from 0 and √ is smooth. Both
    # branches are always computed, so each gets an argument for which it is finite, in value and in gradient.
    q = 0.0 if _is_exponential(p) else 1 / (p * p)
    small = x < 1e-4 * ((p * p).clamp_max(1.0) if isinstance(p, Tensor) else min(1.0, p * p))
    near = torch.where(small, x, 0.0)
    ratio = 1 - q * near * (1 / 3 - q * near * (1 / 5 - q * near * (1 / 7 - q * near / 9)))  # θ / β
    theta2 = near * ratio * ratio
    a_near = 1 - theta2 / 2 * (1 - theta2 / 12 * (1 - theta2 / 30))
    b_near = ratio * (1 - theta2 / 6 * (1 - theta2 / 20 * (1 - theta2 / 42)))
    beta = torch.sqrt(torch.where(small, 1.0, x))
    theta = beta if _is_exponential(p) else p * torch.atan(beta / p)
    return torch.where(small, a_near, theta.cos()), torch.where(small, b_near, theta.sin() / beta)


def _slopes(x: Tensor, b: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return (da/dβ², db/dβ²) of the closed forms p = 2 and p = 4 at x = β²."""
    w = 1 / (1 + x / (p * p))  # dθ/dβ
    return -0.5 * b * w, -0.25 * w * w if p == 2 else (x / 16 - 3) / 16 * w * w * w


def _dot(x: Tensor, y: Tensor) -> Tensor:
    # linalg.vecdot would be rounded to half precision under autocast; a product and a sum are left alone.
    return (x * y).sum(-1, keepdim=True)


class _SphereUpdate(torch.autograd.Function):
    """The update with its backward by hand: no trigonometry, no division by ‖v‖."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, h: Tensor, out: Tensor, s: Tensor, r: Tensor, p: float, rescale: bool
    ) -> Tensor:
        ctx.p, ctx.rescale = p, rescale
        if torch.compiler.is_compiling():
            # Nothing but the arguments is kept, so the compiler makes one loop over the rows of it.
            ctx.save_for_backward(h, out, s, r)
            return _sphere_update_plain(h, out, s, r, p, rescale)
        hh, kappa, tangent, pp = _project(h, out)
        a, b, scale = _coefficients(hh, pp, s, r, p, rescale)
        ctx.save_for_backward(h, out, s, r, hh, kappa, pp)
        return torch.mul(h, scale * a).addcmul_(tangent, scale * b * s)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, out, s, r, *scalars = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A derivative of the gradient is asked for (create_graph): the formulas below would take what the forward
            # pass kept for constants. Views, since F depends on h and ∂h must not count its path through F.
            h, out, s, r = (t.view_as(t) for t in (h, out, s, r))
            new = _sphere_update_plain(h, out, s, r, ctx.p, ctx.rescale)
            inputs = [t for t, needed in zip((h, out, s, r), ctx.needs_input_grad, strict=False) if needed]
            found = iter(torch.autograd.grad(new, inputs, grad, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:4]), None, None
        if scalars:
            hh, kappa, pp = scalars
            tangent = torch.addcmul(out.to(h.dtype), h, kappa, value=-1)
        else:
            hh, kappa, tangent, pp = _project(h, out)
        a, b, scale = _coefficients(hh, pp, s, r, ctx.p, ctx.rescale)
        # y = a·h + b·s·P is the point before rescaling; G_y = scale·G + pull·y its gradient. P ⊥ h throughout.
        gh, gp = _dot(grad, h), _dot(grad, tangent)
        pull = d_r = torch.zeros_like(scale)
        if ctx.p == 1 or ctx.rescale:
            gy = a * gh + b * s * gp
            pull = -scale * gy / (a * a * hh + b * b * s * s * pp).clamp_min(_TINY)
            d_r = scale / r * gy
        gyh, gyp = scale * gh + pull * a * hh, scale * gp + pull * b * s * pp
        w = torch.zeros_like(scale)
        if ctx.p != 1:
            x = s * s * pp / (r * r)
            da, db = _slopes(x, b, ctx.p)
            d_x = da * gyh + db * s * gyp
            w = 2 / (r * r) * d_x
            d_r = d_r - 2 * x / r * d_x
        # g_v = b·G_y + w·v, m = ⟨h, g_v⟩/⟨h, h⟩; ∂F = s(g_v − m·h); ∂h = a·G_y − κ·∂F − s·m·P; ∂s = ⟨g_v, P⟩.
        m = b * gyh / hh
        d_s = b * gyp + w * s * pp
        g_y = torch.mul(grad, scale).addcmul_(h, pull * a).addcmul_(tangent, pull * b * s)
        d_out = torch.mul(g_y, s * b).addcmul_(tangent, s * w * s).addcmul_(h, -s * m)
        d_h = g_y.mul_(a).addcmul_(d_out, -kappa).addcmul_(tangent, -s * m)
        return d_h, d_out.to(out.dtype), d_s.sum().to(s.dtype), d_r.sum().to(r.dtype), None, None


def _project(h: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """⟨h,h⟩, κ = ⟨h,F⟩/⟨h,h⟩, P = F − κ·h and ⟨P,P⟩."""
    wide = out.to(h.dtype)
    hh = _dot(h, h).clamp_min(_TINY)
    kappa = _dot(h, wide) / hh
    tangent = torch.addcmul(wide, h, kappa, value=-1)
    return hh, kappa, tangent, _dot(tangent, tangent)


def _coefficients(
    hh: Tensor, pp: Tensor, s: Tensor, r: Tensor, p: float, rescale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, scale) of h′ = scale·(a·h + b·s·P) for ⟨h,h⟩ and ⟨P,P⟩."""
    if p == 1:  # the normalised sum: its length is measured, so the norm cannot drift
        a = b = torch.ones_like(pp)
    else:
        a, b = sphere_coefficients(s * s * pp / (r * r), p)
    if p == 1 or rescale:
        # As exp(−½·log): Inductor stores the result of an exp that several readers use, and would take a reciprocal
        # root anew for every vector of every row, which made the compiled update a tenth slower.
        square = (a * a * hh + b * b * s * s * pp).clamp_min(_TINY)
        return a, b, r * torch.exp(-0.5 * torch.log(square))
    return a, b, torch.ones_like(pp)


def sphere_update(
    h: Tensor,
    out: Tensor,
    step: Tensor,
    radius: Tensor | float,
    p: float | Tensor,
    rescale: bool = False,
    clamp: float | None = None,
) -> Tensor:
    """Move h on its sphere by the sublayer output: h′ = a·h + b·v (the module's formula), norm kept.

    Args:
        h: stream, (…, d), ‖h‖ = radius, float32 or float64 (half precision is computed in float32 and cast back).
        out: sublayer output F(h), (…, d), any floating dtype.
        step: 0-dim step size s, or one per channel, (d,), which multiplies F before it is projected.
        radius: radius r > 0, a 0-dim tensor if it is learned.
        p: member of the family, p > 0 or `math.inf`; a 0-dim tensor if it is learned.
        rescale: divide by the measured norm at the end, so that rounding cannot accumulate; p = 1 always does.
        clamp: largest angle of ‖P‖/r and of s times it, for p = ∞.

    Returns:
        h′, with the shape and dtype of h.

    Source: SpheretNorm (arXiv 2608.02668); p → ∞ is GeoNorm (arXiv 2601.22095), which clamps at π/4.
    """
    if h.dtype in (torch.float16, torch.bfloat16):
        return sphere_update(h.float(), out, step, radius, p, rescale, clamp).to(h.dtype)
    step = step.to(h.dtype)
    radius = radius.to(h.dtype) if isinstance(radius, Tensor) else h.new_full((), radius)
    if step.ndim:
        # s ⊙ P would not be tangential: the channels are weighted first, and then the radial part is taken out.
        out, step = step * out.to(h.dtype), torch.ones_like(step[0])
    if clamp is not None:
        step = _clamped(h, out, step, radius, clamp)
    if not isinstance(p, Tensor) and p in _CLOSED:
        if torch.compiler.is_compiling():
            # Marked for recomputation, or the compiler would keep scalars of the forward pass and split its loop.
            return cast(
                "Tensor", checkpoint(_SphereUpdate.apply, h, out, step, radius, p, rescale, use_reentrant=False)
            )
        return _SphereUpdate.apply(h, out, step, radius, p, rescale)
    return _sphere_update_plain(h, out, step, radius, p, rescale)


def _clamped(h: Tensor, out: Tensor, s: Tensor, r: Tensor, clamp: float) -> Tensor:
    """The step of each token, (…, 1), that keeps θ = ‖P‖/r and s·θ within ±clamp; nothing is divided by ‖P‖."""
    *_, pp = _project(h, out)
    limit = clamp * clamp
    x = pp / (r * r)
    s = s * (clamp * torch.rsqrt(x.clamp_min(limit)))
    return s * (clamp * torch.rsqrt((s * s * x).clamp_min(limit)))


def _sphere_update_plain(h: Tensor, out: Tensor, s: Tensor, r: Tensor, p: float | Tensor, rescale: bool) -> Tensor:
    out = out.to(h.dtype)
    kappa = (h * out).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True).clamp_min(_TINY)
    v = s * (out - kappa * h)
    if not isinstance(p, Tensor) and p == 1:
        new = h + v
    else:
        a, b = sphere_coefficients((v * v).sum(-1, keepdim=True) / (r * r), p)
        new = a * h + b * v
    if (not isinstance(p, Tensor) and p == 1) or rescale:
        new = new * (r * torch.rsqrt((new * new).sum(-1, keepdim=True).clamp_min(_TINY)))
    return new
