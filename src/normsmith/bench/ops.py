"""The sphere update against what it replaces: residual add and LayerNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normsmith.bench.timing import Timing, interleave, seconds_of
from normsmith.errors import VerificationError
from normsmith.ops.sphere import sphere_update, sphere_update_reference

Tick = Callable[[int], None] | None


def bench_sphere_update(
    tokens: int = 4096, width: int = 768, p: float = 1.0, rounds: int = 30, tick: Tick = None
) -> dict[str, Timing]:
    """Forward and backward of one update, eager and compiled, beside residual add + LayerNorm and the literal formula.

    The cases do comparable work: both read the stream and the sublayer output and give gradients to both; the pair's
    gradient reaches the sum and the normalised sum.
    """
    torch.manual_seed(0)
    radius = width**0.5
    h = torch.randn(tokens, width)
    h = (h * radius / h.norm(dim=-1, keepdim=True)).requires_grad_()
    out = torch.randn(tokens, width).requires_grad_()
    step = torch.tensor(0.5).requires_grad_()
    gamma, beta = torch.ones(width).requires_grad_(), torch.zeros(width).requires_grad_()
    grad = torch.randn(tokens, width)

    def update(h: Tensor, out: Tensor) -> Tensor:
        return sphere_update(h, out, step, radius, p)

    def pair(h: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        total = h + out
        return F.layer_norm(total, (width,), gamma, beta), total

    def literal(h: Tensor, out: Tensor) -> Tensor:
        tangent = out - (h * out).sum(-1, keepdim=True) / (h * h).sum(-1, keepdim=True) * h
        v = step * tangent
        length = v.norm(dim=-1, keepdim=True)
        theta = length / radius if math.isinf(p) else p * torch.atan(length / radius / p)
        return theta.cos() * h + theta.sin() * radius * v / length

    functions: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
        "add + layer_norm, eager": (pair, [h, out, gamma, beta]),
        "add + layer_norm, compiled": (torch.compile(pair), [h, out, gamma, beta]),
        "sphere update, literal, eager": (literal, [h, out, step]),
        "sphere update, fused, eager": (update, [h, out, step]),
        "sphere update, fused, compiled": (torch.compile(update), [h, out, step]),
    }
    expected = sphere_update_reference(h, out, step, radius, p, rescale=p == 1)
    for name in ("sphere update, literal, eager", "sphere update, fused, eager", "sphere update, fused, compiled"):
        worst = float((functions[name][0](h, out).detach().double() - expected.detach()).abs().max())
        if not worst <= 1e-4:  # nor is a NaN within it
            raise VerificationError(f"{name} differs from the float64 reference by {worst:.1e}: nothing is timed")

    def case(function: Callable[..., Any], wrt: list[Tensor]) -> Callable[[], float]:
        def once() -> None:
            results = function(h, out)
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.grad(results, wrt, [grad] * len(results))

        def timed() -> float:
            once()  # untimed: no case pays for the memory and the caches that its predecessor left behind
            return seconds_of(once)

        return timed

    cases = {name: case(function, wrt) for name, (function, wrt) in functions.items()}
    return interleave(cases, rounds, warmup=5, tick=tick)
