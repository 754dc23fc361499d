"""Extreme singular values of a block's Jacobian at single tokens, without ever forming it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.diagnostics.blocks import (
    Blocks,
    Call,
    eager_attention,
    evaluating,
    run,
    stream_in,
    stream_out,
    with_stream,
)
from normsmith.errors import InputError

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Extremes:
    """Largest and smallest singular value (rows,) with the residuals ‖Jᵀu − σv‖ of both; zero means exact."""

    largest: Tensor
    smallest: Tensor
    largest_residual: Tensor
    smallest_residual: Tensor


def extreme_singular_values(apply: Product, transpose: Product, start: Tensor, steps: int) -> Extremes:
    """Golub–Kahan–Lanczos bidiagonalisation with full reorthogonalisation: J V = U B, B upper bidiagonal.

    The largest singular value of B never exceeds that of J and its smallest never falls below; after d steps they are
    those of J. Every step costs one product with J and one with Jᵀ.

    Args:
        apply: x ↦ J x, rows of J x for rows of x, each row with its own J.
        transpose: u ↦ Jᵀ u.
        start: first vectors (rows, d), not zero; its dtype is that of the recurrence.
        steps: at most d.

    Source: Golub and Kahan, SIAM J. Numer. Anal. 2(2), 1965.
    """
    rows, d = start.shape
    steps = min(steps, d)
    V, U = start.new_zeros(steps + 1, rows, d), start.new_zeros(steps, rows, d)
    alpha, beta = start.new_zeros(rows, steps), start.new_zeros(rows, steps)
    V[0] = start / start.norm(dim=-1, keepdim=True)
    for j in range(steps):
        U[j], alpha[:, j] = _next(apply(V[j]), U[:j])
        V[j + 1], beta[:, j] = _next(transpose(U[j]), V[: j + 1])
    B = torch.diag_embed(alpha) + torch.diag_embed(beta[:, : steps - 1], offset=1)
    left, values, _ = torch.linalg.svd(B)
    # JᵀU = VBᵀ + β v eᵀ: what is left of Jᵀu − σv for the Ritz vector u = U·left is β times its last component.
    residual = beta[:, -1:] * left[:, -1, :].abs()
    if steps == d:
        residual = torch.zeros_like(residual)
    return Extremes(values[:, 0], values[:, -1], residual[:, 0], residual[:, -1])


def _next(x: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The part of x orthogonal to the basis vectors (k, rows, d), normalised, and its length.

    Where nothing is left, J maps what has been seen onto itself: any new direction will do, at length zero.
    """
    scale = x.norm(dim=-1)
    x = _orthogonal(x, basis)
    length = x.norm(dim=-1)
    empty = length <= 1e3 * torch.finfo(x.dtype).eps * scale
    if bool((empty | (scale == 0)).any()):
        generator = torch.Generator().manual_seed(len(basis))
        fresh = _orthogonal(torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device), basis)
        empty = (empty | (scale == 0))[:, None]
        x, length = torch.where(empty, fresh, x), torch.where(empty[:, 0], torch.zeros_like(length), length)
    norm = x.norm(dim=-1, keepdim=True)
    return x / norm.clamp_min(torch.finfo(x.dtype).tiny), length


def _orthogonal(x: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):  # once is not enough in floating point
        x = x - torch.einsum("krd,kr->rd", basis, torch.einsum("krd,rd->kr", basis, x))
    return x


def block_jacobians(
    model: nn.Module, ids: Tensor, blocks: Blocks, positions: list[int], steps: int = 64
) -> list[Extremes]:
    """For each block, at each position t, the extreme singular values of ∂h_out[t]/∂h_in[t], a (d, d) matrix.

    The other tokens stay as they are: this is what happens to one token's stream.

    Args:
        model: any model that takes `input_ids`, of float32 or float64.
        ids: one window of token ids (1, time).
        blocks: from `find_blocks`.
        positions: the tokens t, below time.
        steps: of Lanczos; `d` or more is exact.

    Raises:
        InputError: a block cannot be differentiated twice, so that there is no product with J.
    """
    calls: dict[nn.Module, Call] = {}
    positions = [t for t in positions if t < ids.shape[1]]

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[module] = (args, kwargs)

    wanted = [p for p in model.parameters() if p.requires_grad]
    handles = [block.register_forward_pre_hook(remember, with_kwargs=True) for block in blocks.modules]
    try:
        # A row per position, so that one product serves all of them; the reason why eager may be missing shows below.
        with evaluating(model), eager_attention(model):
            with torch.no_grad():
                run(model, ids.expand(len(positions), -1))
            for handle in handles:
                handle.remove()
            for parameter in wanted:  # constants here: less to keep, and hand-written backwards stay linear
                parameter.requires_grad_(False)
            return [_extremes(block, calls[block], positions, steps) for block in blocks.modules]
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"a block of {type(model).__name__} cannot be differentiated twice ({' '.join(str(error).split())[:160]})"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
        for parameter in wanted:
            parameter.requires_grad_(True)


def _extremes(block: nn.Module, call: Call, positions: list[int], steps: int) -> Extremes:
    h = stream_in(*call)
    assert h is not None
    rows = torch.arange(len(positions), device=h.device)
    x = h[rows, positions].clone().requires_grad_()
    args, kwargs = with_stream(call, h.index_put((rows, torch.tensor(positions, device=h.device)), x))
    with torch.enable_grad():
        out = stream_out(block(*args, **kwargs))
        assert out is not None
        y = out[rows, positions]
        # J x is the derivative of Jᵀu by u, in direction x: backward twice instead of forward mode, for which
        # autograd functions with a backward of their own have no rule.
        u = torch.zeros_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(y, x, u, create_graph=True)

    def transpose(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v.to(y.dtype), retain_graph=True)[0].double()

    def apply(v: Tensor) -> Tensor:
        return torch.autograd.grad(back, u, v.to(y.dtype), retain_graph=True)[0].double()

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    return extreme_singular_values(apply, transpose, start, steps)
