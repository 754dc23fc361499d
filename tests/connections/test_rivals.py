"""Each connection against its formula written out here, two sublayers in a row, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normsmith.connections import create_connection
from tests.connections.specs import SPECS, move

D, TOTAL = 12, 8
Sublayer = Callable[[Tensor], Tensor]


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.gamma + norm.beta


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def pre(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return h + f(layer_norm(h, c.norm))


def post(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return layer_norm(h + f(h), c.norm)


def sandwich(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return h + layer_norm(f(layer_norm(h, c.norm_in)), c.norm_out)


def keel(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return layer_norm(TOTAL * h + f(layer_norm(h, c.norm_in)), c.norm_out)


def deepnorm(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return layer_norm(h * 1.6817928305074292 + f(h), c.norm)  # (2·4)^¼


def lns(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    k = {1: 1, 2: 1, 3: 2, 4: 2, 7: 4, 8: 4}[c.index]
    return h + f(layer_norm(h, c.norm) / math.sqrt(k))


def mixln(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return post(h, f, c) if c.index <= 2 else pre(h, f, c)  # ⌊¼·4⌋ = 1 block


def mixln_half(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return post(h, f, c) if c.index <= 4 else pre(h, f, c)


def hybrid(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return layer_norm(h + f(h), c.norm) if c.index % 2 else h + f(h)


def hybrid_star(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return pre(h, f, c) if c.index <= 2 else hybrid(h, f, c)


def ngpt(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    alpha = 0.05 * math.sqrt(D) * c.alpha
    return unit(h + alpha * (unit(f(h)) - h))


def scalenorm(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    return h + f(c.norm.gamma * unit(h))


def proj(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    v = (1 + c.alpha.exp()).log() / math.sqrt(c.index) * (f(h) - (h * f(h)).sum(-1, keepdim=True) / D * h)
    return math.sqrt(D) * unit(h + v)


def geonorm(h: Tensor, f: Sublayer, c: Any) -> Tensor:
    tangent = f(h) - (h * f(h)).sum(-1, keepdim=True) / D * h
    angle = (tangent.norm(dim=-1, keepdim=True) / math.sqrt(D)).clamp(max=math.pi / 4)
    angle = (angle * c.alpha / ((c.index + 1) // 2)).clamp(-math.pi / 4, math.pi / 4)
    return angle.cos() * h + angle.sin() * math.sqrt(D) * unit(tangent)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "pre": pre,
    "post": post,
    "peri": sandwich,
    "sandwich": sandwich,
    "keel": keel,
    "deepnorm": deepnorm,
    "lns": lns,
    "mixln": mixln,
    "mixln, half": mixln_half,
    "hybridnorm": hybrid,
    "hybridnorm*": hybrid_star,
    "ngpt": ngpt,
    "scalenorm": scalenorm,
    "sphere": proj,
    "proj": proj,
    "geonorm": geonorm,
}


@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.parametrize("first", [1, 3, 7])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_two_sublayers_are_the_formula(name: str, first: int, scale: float) -> None:
    h = torch.randn(3, 5, D, dtype=torch.float64)
    h = math.sqrt(D) * unit(h) if name in ("sphere", "proj", "geonorm") else unit(h) if name == "ngpt" else h
    wanted = h
    for index in (first, first + 1):
        connection = create_connection(SPECS[name], D, index, TOTAL, norm="layernorm").double()
        move(connection)
        linear = nn.Linear(D, D).double()

        def f(x: Tensor, linear: nn.Linear = linear) -> Tensor:
            return scale * torch.tanh(linear(x))

        h = connection.merge(h, f(connection.prepare(h)))
        wanted = FORMULAS[name](wanted, f, connection)
    torch.testing.assert_close(h, wanted, rtol=1e-9, atol=1e-9)


def test_geonorm_is_clamped_and_its_limit_is_not() -> None:
    h = torch.randn(64, D)
    h = math.sqrt(D) * unit(h)
    out = 100 * torch.randn(64, D)

    def angle(kind: str) -> Tensor:
        c = create_connection(kind, D, 1, 2)
        return torch.acos((unit(c.merge(h, out)) * unit(h)).sum(-1).clamp(-1, 1))

    assert angle("geonorm").max() <= math.pi / 4 + 1e-3
    assert angle("geo").max() > 2


@pytest.mark.parametrize(
    ("options", "damping"),
    [
        ({"decay": "sqrt"}, 5**-0.5),
        ({"decay": "sqrt", "count": "block"}, 3**-0.5),
        ({"decay": "harmonic"}, 1 / 5),
        ({"decay": "harmonic", "count": "block"}, 1 / 3),
        ({"decay": "linear"}, (8 - 4) / 8),  # GeoNorm's (T − l)/T with l from 0
        ({"decay": "linear", "count": "block"}, (4 - 2) / 4),
        ({"decay": "none"}, 1.0),
    ],
)
@pytest.mark.parametrize(
    ("step", "alpha", "start"), [("softplus", None, 1.0), ("sigmoid", None, 0.5), ("raw", None, 1.0), ("raw", 0.3, 0.3),
                                 ("sigmoid", 0.3, 0.3), ("softplus", 0.3, 0.3)],
)  # fmt: skip
def test_step_sizes_at_the_start(options: dict[str, Any], damping: float, step: str, alpha: Any, start: float) -> None:
    c = create_connection("sphere", D, 5, TOTAL, step=step, alpha=alpha, **options)
    assert float(c.step_size().detach()) == pytest.approx(damping * start, rel=1e-6)
    wide = create_connection("sphere", D, 5, TOTAL, step=step, alpha=alpha, per_channel=True, **options)
    torch.testing.assert_close(wide.step_size(), torch.full((D,), damping * start))
    h, out = torch.randn(4, D), torch.randn(4, D)
    torch.testing.assert_close(wide.merge(h, out), c.merge(h, out), rtol=1e-5, atol=1e-5)


def test_sigmoid_stays_below_one_and_raw_may_turn_back() -> None:
    for step, top, bottom in (("sigmoid", 1.0, 0.0), ("raw", 50.0, -50.0)):
        c = create_connection("sphere", D, step=step)
        for value, wanted in ((50.0, top), (-50.0, bottom)):
            c.alpha.data.fill_(value)
            assert float(c.step_size().detach()) == pytest.approx(wanted, abs=1e-6)


def test_a_learned_power_is_the_member_it_says_and_can_be_learned() -> None:
    h = math.sqrt(D) * unit(torch.randn(64, D, dtype=torch.float64))
    out = torch.randn(64, D, dtype=torch.float64)
    for p in (0.5, 1.0, 2.0, 7.0):
        learned = create_connection("sphere", D, p=p, learn_p=True).double()
        torch.testing.assert_close(learned.merge(h, out), create_connection("sphere", D, p=p).double().merge(h, out))
    target = create_connection("sphere", D, p=0.7).double().merge(h, out).detach()
    learned = create_connection("sphere", D, p=3.0, learn_p=True).double()
    optimizer = torch.optim.Adam([learned.q], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (learned.merge(h, out) - target).square().mean().backward()
        optimizer.step()
    assert float(learned.power().detach()) == pytest.approx(0.7, rel=0.02)


def test_a_learned_power_stays_positive_and_finite() -> None:
    h, out = math.sqrt(D) * unit(torch.randn(4, D)), torch.randn(4, D)
    out[0] = 0
    for q in (-200.0, -20.0, 0.0, 200.0):
        c = create_connection("sphere", D, learn_p=True)
        c.q.data.fill_(q)
        new = c.merge(h, out)
        grads = torch.autograd.grad(new, list(c.parameters()), torch.randn_like(new))
        assert new.isfinite().all(), q
        assert all(g.isfinite().all() for g in grads), q
        torch.testing.assert_close(new.norm(dim=-1), torch.full((4,), math.sqrt(D)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, 4.0, math.inf])
def test_a_step_per_channel_keeps_the_norm(p: float) -> None:
    c = create_connection("sphere", D, p=p, per_channel=True, step="raw").double()
    move(c, 2.0)
    h = math.sqrt(D) * unit(torch.randn(64, D, dtype=torch.float64))
    new = c.merge(h, 3 * torch.randn(64, D, dtype=torch.float64))
    torch.testing.assert_close(new.norm(dim=-1), h.norm(dim=-1), rtol=1e-12, atol=0)
