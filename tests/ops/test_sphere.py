"""The sphere family against its geometry and against METHODS' properties, on random and on hard inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normsmith.bench.depth import kept_bytes
from normsmith.connections import create_connection
from normsmith.connections.sphere import SphereEntry
from normsmith.ops.sphere import sphere_coefficients, sphere_update, sphere_update_reference

FAMILY = [0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 7.5, math.inf]
D = 16
RADIUS = math.sqrt(D)
r64 = torch.tensor(RADIUS, dtype=torch.float64)


def on_sphere(*shape: int) -> Tensor:
    x = torch.randn(*shape, D, dtype=torch.float64)
    return x * RADIUS / x.norm(dim=-1, keepdim=True)


def step(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("p", FAMILY)
@pytest.mark.parametrize("rescale", [False, True])
@settings(deadline=None, max_examples=20)
@given(exponent=st.floats(-9, 3), seed=st.integers(0, 10_000))
def test_equals_the_trigonometric_form(p: float, rescale: bool, exponent: float, seed: int) -> None:
    torch.manual_seed(seed)
    h, out = on_sphere(4), 10**exponent * torch.randn(4, D, dtype=torch.float64)
    new = sphere_update(h, out, step(0.7), r64, p, rescale)
    literal = sphere_update_reference(h, out, step(0.7), r64, p, rescale or p == 1)
    # The literal form rounds θ before it takes its cosine: for p = ∞ and β up to 1e3 that is 1e3 roundings.
    torch.testing.assert_close(new, literal, rtol=0, atol=1e-14 * RADIUS * max(1, 10**exponent))
    torch.testing.assert_close(new.norm(dim=-1), torch.full((4,), RADIUS, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("p", FAMILY)
@pytest.mark.parametrize("rescale", [False, True])
def test_gradients(p: float, rescale: bool) -> None:
    h, out = on_sphere(6).requires_grad_(), torch.randn(6, D, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        out[0] = 0  # v = 0
        out[1] = 3 * h[1]  # F ∥ h
        out[2] *= 1e-5  # inside the series
        out[3] *= 100  # a huge step
        h[4] *= 1.01  # off the sphere
    s, r = step(0.7).requires_grad_(), r64.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: sphere_update(*a, p, rescale), (h, out, s, r))


@pytest.mark.parametrize("p", [1.0, 2.0, 4.0, math.inf])
@pytest.mark.parametrize("rescale", [False, True])
def test_derivatives_of_gradients(p: float, rescale: bool) -> None:
    h, out = on_sphere(3).requires_grad_(), torch.randn(3, D, dtype=torch.float64).requires_grad_()
    s, r = step(0.7).requires_grad_(), r64.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda *a: sphere_update(*a, p, rescale), (h, out, s, r))
    assert torch.autograd.gradgradcheck(lambda h: sphere_update(h, out.detach(), s.detach(), r64, p, rescale), (h,))
    weight = torch.randn(D, D, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda h: sphere_update(h, (h @ weight).sin(), s.detach(), r64, p, rescale), (h,)
    )


def test_p1_is_the_normalised_sum() -> None:
    h, out = on_sphere(8), torch.randn(8, D, dtype=torch.float64)
    tangent = out - (h * out).sum(-1, keepdim=True) / RADIUS**2 * h
    total = h + 0.7 * tangent
    torch.testing.assert_close(
        sphere_update(h, out, step(0.7), r64, 1), RADIUS * total / total.norm(dim=-1, keepdim=True)
    )


def test_p2_is_the_cayley_transform() -> None:
    h, out = on_sphere(), torch.randn(D, dtype=torch.float64)
    v = 0.7 * (out - (h @ out) / (h @ h) * h)
    w = (torch.outer(v, h) - torch.outer(h, v)) / RADIUS**2
    eye = torch.eye(D, dtype=torch.float64)
    solved = torch.linalg.solve(eye - w / 2, (eye + w / 2) @ h)
    torch.testing.assert_close(sphere_update(h, out, step(0.7), r64, 2), solved, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [4.0, 8.0, 16.0])
def test_tends_to_the_exponential_map_at_the_stated_rate(p: float) -> None:
    beta = torch.tensor(0.5, dtype=torch.float64)
    a, b = sphere_coefficients(beta**2, p)
    point = torch.stack((a, b * beta))
    distance = (point - torch.stack((beta.cos(), beta.sin()))).norm()
    assert distance == pytest.approx(0.5**3 / (3 * p * p), rel=0.1)


@settings(deadline=None, max_examples=50)
@given(beta=st.floats(0.01, 0.5), p=st.floats(4, 200))
def test_the_distance_to_the_exponential_map_is_third_order(beta: float, p: float) -> None:
    x = torch.tensor(beta, dtype=torch.float64)
    (a, b), (a_exp, b_exp) = sphere_coefficients(x**2, p), sphere_coefficients(x**2, math.inf)
    distance = torch.hypot(a - a_exp, x * (b - b_exp))
    assert float(distance) == pytest.approx(beta**3 / (3 * p * p), rel=0.05, abs=1e-15)


@settings(deadline=None, max_examples=30)
@given(p=st.floats(1e-6, 1), exponent=st.floats(-6, 3), seed=st.integers(0, 10_000))
def test_an_angle_never_passes_p_quarter_turns(p: float, exponent: float, seed: int) -> None:
    torch.manual_seed(seed)
    h = on_sphere(8)
    new = sphere_update(h, 10**exponent * torch.randn(8, D, dtype=torch.float64), step(1.0), r64, p)
    angle = 2 * torch.asin((new - h).norm(dim=-1) / (2 * RADIUS))
    assert angle.max() <= p * math.pi / 2 + 1e-7


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), size=st.floats(-3, 2), d=st.integers(2, 24))
def test_p1_and_p2_in_their_own_words_on_random_inputs(seed: int, size: float, d: int) -> None:
    torch.manual_seed(seed)
    h, out = torch.randn(d, dtype=torch.float64), 10**size * torch.randn(d, dtype=torch.float64)
    radius = h.norm()
    v = 0.7 * (out - (h @ out) / (h @ h) * h)
    total = radius * (h + v) / (h + v).norm()
    torch.testing.assert_close(sphere_update(h, out, step(0.7), radius, 1), total, rtol=1e-9, atol=1e-9)
    w = (torch.outer(v, h) - torch.outer(h, v)) / radius**2
    eye = torch.eye(d, dtype=torch.float64)
    solved = torch.linalg.solve(eye - w / 2, (eye + w / 2) @ h)
    torch.testing.assert_close(sphere_update(h, out, step(0.7), radius, 2), solved, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("p", FAMILY)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-6, 3), d=st.integers(2, 70))
def test_the_norm_is_kept_in_float32(p: float, seed: int, exponent: float, d: int) -> None:
    torch.manual_seed(seed)
    h = torch.randn(4, d)
    h = 3 * h / h.norm(dim=-1, keepdim=True)
    new = sphere_update(h, 10**exponent * torch.randn(4, d), torch.tensor(0.9), 3.0, p)
    assert (new.norm(dim=-1) / 3 - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("per_channel", [False, True])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), exponent=st.floats(-9, 3), clamp=st.floats(0.05, 3.1))
def test_the_clamped_map_equals_its_literal_form(per_channel: bool, seed: int, exponent: float, clamp: float) -> None:
    torch.manual_seed(seed)
    h, out = on_sphere(6), 10**exponent * torch.randn(6, D, dtype=torch.float64)
    s = torch.randn(D, dtype=torch.float64) if per_channel else torch.randn((), dtype=torch.float64)
    new = sphere_update(h, out, s, r64, math.inf, clamp=clamp)
    literal = sphere_update_reference(h, out, s, r64, math.inf, rescale=False, clamp=clamp)
    torch.testing.assert_close(new, literal, rtol=1e-9, atol=1e-9)
    angle = 2 * torch.asin(((new - h).norm(dim=-1) / (2 * RADIUS)).clamp(max=1))
    assert angle.max() <= clamp + 1e-6


@settings(deadline=None, max_examples=30)
@given(p=st.floats(0.05, 50), exponent=st.floats(-12, 4), seed=st.integers(0, 10_000))
def test_a_power_in_a_tensor_is_the_same_member(p: float, exponent: float, seed: int) -> None:
    torch.manual_seed(seed)
    h, out = on_sphere(4), 10**exponent * torch.randn(4, D, dtype=torch.float64)
    new = sphere_update(h, out, step(0.7), r64, torch.tensor(p, dtype=torch.float64))
    torch.testing.assert_close(new, sphere_update(h, out, step(0.7), r64, p), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("p", FAMILY)
def test_series_and_trigonometry_meet(p: float) -> None:
    x = torch.logspace(-12, 2, 600, dtype=torch.float64)
    beta = x.sqrt()
    theta = beta if math.isinf(p) else p * torch.atan(beta / p)
    for power in (p,) if math.isinf(p) else (p, torch.tensor(p, dtype=torch.float64)):
        a, b = sphere_coefficients(x, power)
        torch.testing.assert_close(a, theta.cos(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(b, theta.sin() / beta, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("p", [0.1, 1.0, 3.0, 40.0])
def test_gradients_of_a_learned_power(p: float) -> None:
    h, out = on_sphere(5).requires_grad_(), torch.randn(5, D, dtype=torch.float64)
    out[0], out[1], out[2], out[3] = 0, 3 * h[1].detach(), 1e-5 * out[2], 100 * out[3]
    power = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    s = torch.rand(D, dtype=torch.float64).requires_grad_()
    arguments = (h, out.requires_grad_(), s, r64.clone().requires_grad_(), power)
    assert torch.autograd.gradcheck(sphere_update, arguments)


def test_p_to_zero_is_the_identity() -> None:
    h, out = on_sphere(4), torch.randn(4, D, dtype=torch.float64)
    assert (sphere_update(h, out, step(1.0), r64, 1e-3) - h).norm(dim=-1).max() <= RADIUS * 1e-3 * math.pi / 2


def test_first_order_motion_is_the_same_for_all_p() -> None:
    h, out = on_sphere(), torch.randn(D, dtype=torch.float64)
    tangent = out - (h @ out) / (h @ h) * h
    for p in FAMILY:
        moved = (sphere_update(h, out, step(1e-6), r64, p) - h) / 1e-6
        torch.testing.assert_close(moved, tangent, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_finite(p: float, dtype: torch.dtype) -> None:
    h = on_sphere(5).to(dtype)
    out = torch.randn(5, D).to(dtype)
    out[0], out[1], out[2], out[3] = 0, 2 * h[1], 1e4 * out[2], 1e-20 * out[3]
    h[4] = 0  # the zero embedding of a padding token
    tensors = [h.requires_grad_(), out.requires_grad_(), torch.tensor(0.5, requires_grad=True)]
    new = sphere_update(*tensors, torch.tensor(RADIUS), p)
    grads = torch.autograd.grad(new, tensors, torch.randn_like(new))
    assert new.isfinite().all()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("p", [1.0, 2.0, 4.0, math.inf])
def test_norm_after_256_sublayers_in_float32(p: float) -> None:
    d, total = 256, 256
    entry = SphereEntry(d, learn_radius=True)
    h = entry(0.02 * torch.randn(32, d))
    for index in range(1, total + 1):
        connection = create_connection("sphere", d, index, total, p=p)
        connection.bind(entry)
        h = connection.merge(h, torch.randn(32, d) * 3)
    assert h.dtype == torch.float32
    assert ((h.norm(dim=-1) / entry.radius()).detach() - 1).abs().max() <= 1e-5


def test_under_autocast_the_update_stays_in_float32() -> None:
    h, out = on_sphere(4).float(), torch.randn(4, D)
    expected = sphere_update(h, out, step(0.7), r64, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sphere_update(h, out, step(0.7), r64, 1), expected)


def test_entry_lands_on_the_sphere_and_is_finite_at_zero() -> None:
    entry = SphereEntry(D, learn_radius=True)
    x = torch.randn(4, D) * torch.tensor([1.0, 1e-2, 1e-4, 0.0])[:, None]
    x.requires_grad_()
    h = entry(x)
    assert (h[:3].norm(dim=-1) / entry.radius() - 1).abs().max() <= 1e-6
    h.square().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")  # when inductor is imported
def test_compiled_sublayers_keep_no_more_than_with_layer_norm(p: float) -> None:
    h, weight = torch.randn(64, D, requires_grad=True), torch.randn(D, D, requires_grad=True)
    s, gain = torch.tensor(0.5, requires_grad=True), torch.ones(D, requires_grad=True)
    radius = torch.tensor(RADIUS)

    def sphere(h: Tensor, weight: Tensor, s: Tensor) -> Tensor:
        for _ in range(4):
            h = sphere_update(h, h @ weight, s, radius, p)
        return h @ weight

    def post(h: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
        for _ in range(4):
            h = torch.nn.functional.layer_norm(h + h @ weight, (D,), gain)
        return h @ weight

    ours = kept_bytes(lambda: torch.compile(sphere)(h, weight, s), (h, weight, s))
    theirs = kept_bytes(lambda: torch.compile(post)(h, weight, gain), (h, weight, gain))
    assert 0 < ours <= theirs
