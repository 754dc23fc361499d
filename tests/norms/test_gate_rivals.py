"""The norms AutoNorm is compared with: their own formulas, options and starts beyond what every norm is tested for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.special import erf
from torch import Tensor, nn

import normsmith as ns
from normsmith.errors import InputError
from normsmith.norms import Norm, create_norm
from normsmith.norms.dyt import LANGUAGE_ALPHA, language_alpha
from normsmith.norms.layernorm import LayerNorm
from normsmith.norms.random_selector import RandomSelector
from tests.conftest import scramble
from tests.tiny import example, tiny

WIDTH = 12


def made(kind: str, **options: Any) -> Any:
    return scramble(create_norm(kind, WIDTH, **options))


def test_the_random_weights_are_uniform_per_sample_and_shared_by_its_tokens() -> None:
    norm, x = made("random_selector").train(), torch.randn(4000, 3, WIDTH)
    first, second = (candidate(x) for candidate in norm.candidates)
    share = ((norm(x) - second) * (first - second)).sum(-1) / (first - second).square().sum(-1)
    torch.testing.assert_close(share, share[:, :1].expand(-1, 3), rtol=1e-3, atol=1e-4)
    quantiles = torch.quantile(share[:, 0], torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]))
    torch.testing.assert_close(quantiles, torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), atol=0.04, rtol=0)


def test_more_than_two_random_weights_are_uniform_on_the_simplex() -> None:
    norm = create_norm("random_selector", 1, candidates=["identity", "scalenorm", "rmsnorm"]).train()
    assert isinstance(norm, RandomSelector)
    for k, candidate in enumerate(norm.candidates):
        candidate.register_forward_hook(lambda m, args, y, k=k: torch.full_like(y, float(k == 0)))
    share = norm(torch.ones(20_000, 1))[:, 0]  # the weight of the first: Beta(1, 2)
    assert float(share.detach().mean()) == pytest.approx(1 / 3, abs=0.01)
    assert float(share.detach().var()) == pytest.approx(1 / 18, abs=0.005)


def test_random_selection_in_evaluation_is_the_mean_or_random_on_request() -> None:
    x = torch.randn(3, 2, WIDTH)
    norm = made("random_selector").eval()
    torch.testing.assert_close(norm(x), sum(candidate(x) for candidate in norm.candidates) / 2)
    norm = made("random_selector", evaluation="sampled").eval()
    assert not torch.equal(norm(x), norm(x))


def test_the_frozen_ln_is_a_layernorm_whose_affine_can_be_frozen() -> None:
    x = torch.randn(3, WIDTH)
    frozen, plain = made("frozen_ln", affine_frozen=True), LayerNorm(WIDTH)
    plain.load_state_dict(frozen.state_dict())
    assert torch.equal(frozen(x), plain(x))
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(p.requires_grad for p in create_norm("frozen_ln", WIDTH).parameters())


def test_a_frozen_ln_freezes_copies_not_the_parameters_of_the_model() -> None:
    model = tiny("gpt2")
    ns.swap_norms_(model, {"kind": "frozen_ln", "affine_frozen": True})
    assert not any(p.requires_grad for m in model.modules() if isinstance(m, LayerNorm) for p in m.parameters())
    ns.restore_(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("deviation", ["biased", "unbiased"])
def test_adanorm_is_its_formula_with_a_constant_factor(deviation: str) -> None:
    norm = create_norm("adanorm", WIDTH, k=0.3, scale=2.0, deviation=deviation, eps=1e-2)
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    sigma = x.std(-1, keepdim=True, unbiased=False).square().add(1e-2).sqrt()
    sigma = sigma if deviation == "biased" else x.std(-1, keepdim=True) + 1e-2
    y = (x - x.mean(-1, keepdim=True)) / sigma
    torch.testing.assert_close(norm(x), 2 * (1 - 0.3 * y) * y)
    upstream = torch.randn_like(x)
    (got,) = torch.autograd.grad(norm(x), x, upstream)
    (expected,) = torch.autograd.grad(y, x, upstream * 2 * (1 - 0.3 * y.detach()))
    torch.testing.assert_close(got, expected)
    assert list(norm.parameters()) == []


@pytest.mark.parametrize("kind", ["film", "adaln_self"])
def test_generated_gains_start_as_a_plain_layernorm_and_see_the_pooled_tokens(kind: str) -> None:
    x = torch.randn(3, 4, WIDTH)
    fresh = create_norm(kind, WIDTH)
    torch.testing.assert_close(fresh(x), nn.functional.layer_norm(x, (WIDTH,), eps=fresh.config.eps))
    assert sum(p.numel() for p in fresh.parameters()) == 2 * WIDTH**2 + 2 * WIDTH
    norm = made(kind, pool="sequence").double()
    norm.token_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    means = torch.stack((x[0, :3].mean(0), x[1].mean(0), torch.zeros(WIDTH))).double()
    c = nn.functional.silu(means) if kind == "adaln_self" else means
    gain, shift = (c @ norm.generator.T + norm.generator_shift).chunk(2, -1)
    plain = nn.functional.layer_norm(x.double(), (WIDTH,), eps=norm.config.eps)
    expected = (1 + gain)[:, None] * plain + shift[:, None]
    torch.testing.assert_close(norm(x.double()), expected)
    torch.testing.assert_close(norm.reference(x), expected)


@pytest.mark.parametrize("kind", ["film", "adaln_self"])
def test_generated_gains_start_from_the_trained_norm(kind: str) -> None:
    model = tiny("gpt2")
    report = ns.swap_norms_(model, kind, example=example(model))
    assert all(deviation is not None and deviation < 1e-5 for *_, deviation in report.swapped)


def test_derf_is_the_error_function() -> None:
    norm, x = made("derf", shift=0.2), torch.randn(4, WIDTH)
    alpha, shift, gamma, beta = (t.detach().double().numpy() for t in (norm.alpha, norm.shift, norm.gamma, norm.beta))
    expected = gamma * erf(alpha * x.double().numpy() + shift) + beta
    torch.testing.assert_close(norm(x).double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
    fresh = create_norm("derf", WIDTH)
    assert [float(t.detach().sum()) for t in (fresh.alpha, fresh.shift, fresh.beta)] == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_squashing_norms_are_fitted_to_the_old_output(kind: str) -> None:
    model = tiny("gpt2")
    fitted = ns.swap_norms_(model, kind, example=example(model)).swapped
    ns.restore_(model)
    fresh = ns.swap_norms_(model, kind, init="fresh", example=example(model)).swapped
    for (*_, close), (*_, far) in zip(fitted, fresh, strict=True):
        assert close is not None
        assert far is not None
        assert close < 0.5 * far


@pytest.mark.parametrize(("width", "values"), LANGUAGE_ALPHA.items())
def test_the_slope_of_language_models_is_the_published_table(width: int, values: tuple[float, float]) -> None:
    assert (language_alpha(width, "attention"), language_alpha(width)) == pytest.approx(values)
    norm = create_norm("dyt", width, alpha="width", place="attention")
    assert norm.alpha.item() == pytest.approx(values[0])


def test_the_slope_between_the_rows_of_the_table_is_interpolated() -> None:
    assert language_alpha(1280) == pytest.approx(0.839, abs=1e-3)
    assert language_alpha(1280, "attention") == 1.0
    assert (language_alpha(64), language_alpha(20_000)) == (1.0, 0.05)
    assert language_alpha(5793) == pytest.approx((0.2 + 0.05) / 2, abs=1e-3)  # √(4096·8192)
    assert create_norm("dyt", 64).alpha.item() == 0.5, "vision, and every explicit value"
    assert create_norm("dyt", 64, alpha="0.3").alpha.item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dyt", {"alpha": 0.0}, "alpha = 0.0"),
        ("dyt", {"alpha": "wide"}, "alpha"),
        ("dyt", {"alpha": float("nan")}, "alpha = nan"),
        ("derf", {"alpha": float("inf")}, "alpha = inf"),
        ("derf", {"shift": float("nan")}, "shift = nan"),
        ("derf", {"alpha": -1.0}, "alpha = -1.0"),
        ("adanorm", {"scale": 0.0}, "scale = 0.0"),
        ("film", {"pool": "batch"}, "pool = 'batch'"),
        ("random_selector", {"candidates": ["dyt"]}, "at least two"),
        ("random_selector", {"evaluation": "soft"}, "evaluation = 'soft'"),
        ("frozen_ln", {"frozen": True}, "unknown key 'frozen'"),
    ],
)
def test_bad_options_are_one_clear_sentence(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create_norm(kind, WIDTH, **options)


def test_a_swap_between_norms_whose_options_have_one_name_and_other_values() -> None:
    x = torch.randn(3, WIDTH)
    dyt = create_norm("dyt", WIDTH, alpha="width")
    derf = type(create_norm("derf", WIDTH)).from_site(dyt, WIDTH)
    assert isinstance(derf, Norm)
    y: Tensor = derf(x)
    assert y.isfinite().all()
