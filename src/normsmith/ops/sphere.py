"""The p-family of retractions on the sphere of radius r: h′ = a·h + b·v with v in the tangent space at h.

With P = F − (⟨h,F⟩/⟨h,h⟩)·h, v = s·P, β = ‖v‖/r and θ = p·arctan(β/p) the member p moves h by the angle θ towards v:
a = cos θ and b = sin θ / β. p = 1 is the normalised sum (gnomonic projection), p = 2 the Cayley transform, p → ∞ the
exponential map. For finite closed forms a and b are rational in β², so nothing divides by ‖v‖ and v = 0 is harmless.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_TINY = 1e-10  # a shorter vector (the zero embedding of a padding token) counts as 1e-5 long, as in ScaleNorm
_CLOSED = (1, 2, 4)  # members with rational coefficients, for which a hand-written backward exists


def sphere_update_reference(
    h: Tensor, out: Tensor, step: Tensor, radius: Tensor | float, p: float, rescale: bool
) -> Tensor:
    """The retraction in float64 as it is written, with trigonometry; slow, for tests. Arguments as `sphere_update`."""
    h, out, step = h.double(), out.double(), step.double()
    radius = radius.double() if isinstance(radius, Tensor) else radius
    tangent = out - (h * out).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
    v = step * tangent
    length = v.norm(dim=-1, keepdim=True)
    beta = length / radius
    theta = beta if math.isinf(p) else p * torch.atan(beta / p)
    direction = v / torch.where(length > 0, length, 1.0)
    new = theta.cos() * h + theta.sin() * radius * direction
    return new * radius / new.norm(dim=-1, keepdim=True) if rescale else new


def sphere_coefficients(beta2: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return (a, b) = (cos θ, sin θ / β) for θ = p·arctan(β/p) from β² alone.

    Args:
        beta2: β² ≥ 0 of any shape, floating point.
        p: member of the family, p > 0 or `math.inf`. p in {1, 2, 4} is rational in β² (p = 1: in √(1+β²)).
    """
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


def _trigonometric(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    # Below the threshold the series in x = β² is exact to float64; above it β is far from 0 and √ is smooth. Both
    # branches are always computed, so each gets an argument for which it is finite, in value and in gradient.
    q = 0.0 if math.isinf(p) else 1 / (p * p)
    small = x < 1e-4 * min(1.0, p * p)
    near = torch.where(small, x, 0.0)
    ratio = 1 - q * near * (1 / 3 - q * near * (1 / 5 - q * near * (1 / 7 - q * near / 9)))  # θ / β
    theta2 = near * ratio * ratio
    a_near = 1 - theta2 / 2 * (1 - theta2 / 12 * (1 - theta2 / 30))
    b_near = ratio * (1 - theta2 / 6 * (1 - theta2 / 20 * (1 - theta2 / 42)))
    beta = torch.sqrt(torch.where(small, 1.0, x))
    theta = beta if math.isinf(p) else p * torch.atan(beta / p)
    return torch.where(small, a_near, theta.cos()), torch.where(small, b_near, theta.sin() / beta)


def _slopes(x: Tensor, b: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return (da/dβ², db/dβ²) of the closed forms p = 2 and p = 4 at x = β²."""
    w = 1 / (1 + x / (p * p))  # dθ/dβ
    return -0.5 * b * w, -0.25 * w * w if p == 2 else (x / 16 - 3) / 16 * w * w * w


def _dot(x: Tensor, y: Tensor) -> Tensor:
    # linalg.vecdot would be rounded to half precision under autocast; a product and a sum are left alone.
    return (x * y).sum(-1, keepdim=True)


class _SphereUpdate(torch.autograd.Function):
    """Forward and backward as linear combinations of h, F and G with one scalar per token: few passes over memory."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, h: Tensor, out: Tensor, s: Tensor, r: Tensor, p: float, rescale: bool
    ) -> Tensor:
        wide = out.to(h.dtype)
        hh, hf = _dot(h, h).clamp_min(_TINY), _dot(h, wide)
        kappa = hf / hh
        tangent = torch.addcmul(wide, h, kappa, value=-1)
        pp = _dot(tangent, tangent)
        x = s * s * pp / (r * r)
        if p == 1:  # the normalised sum: its length is measured, so the norm cannot drift
            a = b = torch.ones_like(x)
        else:
            a, b = sphere_coefficients(x, p)
        scale = torch.ones_like(x)
        if p == 1 or rescale:
            # As exp(−½·log): Inductor stores the result of an exp that several readers use, and would take a
            # reciprocal root anew for every vector of every row, which made the compiled update a tenth slower.
            scale = r * torch.exp(-0.5 * torch.log((a * a * hh + b * b * s * s * pp).clamp_min(_TINY)))
        ctx.save_for_backward(h, out, s, r, hh, hf, pp, a, b, scale)
        ctx.p, ctx.rescaled = p, p == 1 or rescale
        return torch.mul(h, scale * (a - b * s * kappa)).addcmul_(wide, scale * b * s)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, out, s, r, hh, hf, pp, a, b, scale = ctx.saved_tensors
        wide = out.to(h.dtype)
        kappa = hf / hh
        # Inner products of the upstream gradient, first with respect to y = a·h + b·v, the point before rescaling.
        gh, gp = _dot(grad, h), _dot(grad, wide)
        gp = gp - kappa * gh
        g0, gh0, gp0 = scale, scale * gh, scale * gp
        on_h = on_p = torch.zeros_like(scale)  # G_y = g0·G + on_h·h + on_p·P
        d_r = torch.zeros_like(scale)
        if ctx.rescaled:
            gy = a * gh + b * s * gp
            d_r = scale / r * gy
            pull = -scale * gy * (scale / r).square()
            on_h, on_p = pull * a, pull * b * s
            gh0, gp0 = gh0 + on_h * hh, gp0 + on_p * pp
        if ctx.p == 1:
            w = torch.zeros_like(scale)
        else:
            x = s * s * pp / (r * r)
            da, db = _slopes(x, b, ctx.p)
            d_x = da * gh0 + db * s * gp0
            w = 2 / (r * r) * d_x
            d_r = d_r - 2 * x / r * d_x
        # g_v = b·G_y + w·v = bg·G + bh·h + bp·P, and m = ⟨h, g_v⟩/⟨h, h⟩.
        bg, bh, bp = b * g0, b * on_h, b * on_p + w * s
        m = b * gh0 / hh
        d_s = b * gp0 + w * s * pp
        # ∂F = s(g_v − m·h); ∂h = a·G_y − s(κ·g_v + m·F − 2κm·h) with F = P + κh. P is expanded into F − κh.
        f_p = s * bp
        f_h = s * (bh - m) - f_p * kappa
        h_p = a * on_p - s * (kappa * bp + m)
        h_h = a * on_h - s * (kappa * bh - kappa * m) - h_p * kappa
        d_h = torch.mul(grad, a * g0 - s * kappa * bg).addcmul_(wide, h_p).addcmul_(h, h_h)
        d_out = torch.mul(grad, s * bg).addcmul_(wide, f_p).addcmul_(h, f_h).to(out.dtype)
        return d_h, d_out, d_s.sum().to(s.dtype), d_r.sum().to(r.dtype), None, None


def sphere_update(
    h: Tensor, out: Tensor, step: Tensor, radius: Tensor | float, p: float, rescale: bool = False
) -> Tensor:
    """Move h on its sphere by the sublayer output: h′ = a·h + b·v (the module's formula), norm kept.

    Args:
        h: stream, (…, d), ‖h‖ = radius, float32 or float64 (half precision is computed in float32 and cast back).
        out: sublayer output F(h), (…, d), any floating dtype.
        step: 0-dim step size s > 0.
        radius: radius r > 0, a 0-dim tensor if it is learned.
        p: member of the family, p > 0 or `math.inf`.
        rescale: divide by the measured norm at the end, so that rounding cannot accumulate; p = 1 always does.

    Returns:
        h′, with the shape and dtype of h.

    Source: SpheretNorm (arXiv 2608.02668); p → ∞ is GeoNorm (arXiv 2601.22095) without its clamp.
    """
    if h.dtype in (torch.float16, torch.bfloat16):
        return sphere_update(h.float(), out, step, radius, p, rescale).to(h.dtype)
    step = step.to(h.dtype)
    radius = radius.to(h.dtype) if isinstance(radius, Tensor) else h.new_full((), radius)
    if p in _CLOSED:
        return _SphereUpdate.apply(h, out, step, radius, p, rescale)
    return _sphere_update_plain(h, out, step, radius, p, rescale)


def _sphere_update_plain(h: Tensor, out: Tensor, s: Tensor, r: Tensor, p: float, rescale: bool) -> Tensor:
    out = out.to(h.dtype)
    kappa = (h * out).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True).clamp_min(_TINY)
    v = s * (out - kappa * h)
    if p == 1:
        new = h + v
    else:
        a, b = sphere_coefficients((v * v).sum(-1, keepdim=True) / (r * r), p)
        new = a * h + b * v
    if p == 1 or rescale:
        new = new * (r * torch.rsqrt((new * new).sum(-1, keepdim=True).clamp_min(_TINY)))
    return new
