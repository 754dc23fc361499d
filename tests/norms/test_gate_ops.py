"""The gate's functions against float64, scipy and the distribution they sample from."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import entropy as scipy_entropy
from torch import Tensor

from normsmith.ops.gate import (
    Selector,
    gate_logits,
    gate_reference,
    gate_weights,
    gumbel_weights,
    masked_mean,
    mix,
    mix_reference,
    pool_reference,
    pool_tokens,
)


def selector(width: int = 12, hidden: int = 6, count: int = 3, spread: float = 1.0) -> Selector:
    shapes = ((hidden, width), (hidden,), (count, hidden), (count,))
    return Selector(*(spread * torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("tau", [0.1, 1.0, 7.0])
def test_weights_and_entropy_are_those_of_the_formula(scale: float, tau: float) -> None:
    x, made = scale * torch.randn(4, 5, 12), selector()
    weights, entropy = gate_weights(gate_logits(x, made), tau)
    expected = gate_reference(x, made, tau)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(
        entropy.double(), torch.from_numpy(scipy_entropy(expected.numpy(), axis=-1)), rtol=1e-3, atol=1e-5
    )


def test_the_entropy_of_a_decided_gate_is_zero_and_of_an_open_one_ln_k() -> None:
    weights, entropy = gate_weights(torch.tensor([[500.0, 0.0, -500.0], [2.0, 2.0, 2.0]]))
    assert torch.equal(weights[0], torch.tensor([1.0, 0.0, 0.0]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 3.0]).clamp_max(1) * torch.log(torch.tensor(3.0)))


def test_a_hard_sample_is_one_hot_to_the_bit_with_the_gradient_of_the_soft_one() -> None:
    logits = torch.randn(64, 3, requires_grad=True)
    uniform, upstream = torch.rand(64, 3), torch.randn(64, 3)
    hard, soft = (gumbel_weights(logits, uniform, 0.7, hard) for hard in (True, False))
    assert torch.equal(hard.detach().sort(-1).values, torch.tensor([[0.0, 0.0, 1.0]]).expand(64, 3))
    assert torch.equal(hard.argmax(-1), soft.argmax(-1))
    (a,), (b,) = (torch.autograd.grad(w, logits, upstream) for w in (hard, soft))
    assert torch.equal(a, b)
    assert a.abs().max() > 1e-3


def test_samples_have_the_probabilities_of_the_softmax_at_any_temperature() -> None:
    logits = torch.tensor([0.3, -1.0, 1.2]).expand(200_000, 3)
    for tau in (0.2, 3.0):
        share = gumbel_weights(logits, torch.rand(200_000, 3), tau, hard=True).mean(0)
        torch.testing.assert_close(share, logits[0].softmax(-1), atol=6e-3, rtol=0)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-24])
def test_the_noise_is_finite_at_the_ends_of_the_random_numbers(extreme: float) -> None:
    """torch.rand can return 0, and about one training step in a hundred would meet it."""
    logits = torch.randn(2, 2, requires_grad=True)
    weights = gumbel_weights(logits, torch.tensor([[extreme, 0.5], [extreme, extreme]]), 0.1, hard=False)
    weights.square().sum().backward()
    assert weights.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 2, 5, 8), (4, 8), (8,)])
@pytest.mark.parametrize("pool", ["token", "sequence"])
def test_pooling_is_the_mean_over_valid_tokens(shape: tuple[int, ...], pool: str) -> None:
    x = torch.randn(shape)
    mask = (torch.rand(shape[:-1]) > 0.4).long() if len(shape) > 2 else None
    if mask is not None:
        mask[0] = 0  # a sample of padding alone
    pooled = pool_tokens(x, pool, mask)
    torch.testing.assert_close(pooled.double(), pool_reference(x, pool, mask))
    assert pooled.isfinite().all()


def test_what_stands_at_padding_does_not_matter() -> None:
    x, mask = torch.randn(2, 4, 6), torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    dirty = torch.where((mask != 0)[..., None], x, float("nan")).requires_grad_()
    pooled = pool_tokens(dirty, "sequence", mask)
    assert torch.equal(pooled, pool_tokens(x, "sequence", mask))
    (gradient,) = torch.autograd.grad(pooled.sum(), dirty)
    assert torch.equal(gradient[0, 2:], torch.zeros(2, 6))


def test_a_mask_of_other_tokens_is_ignored() -> None:
    x = torch.randn(2, 4, 6)
    assert torch.equal(pool_tokens(x, "sequence", torch.zeros(2, 7)), x.mean(1, keepdim=True))


@pytest.mark.parametrize("lead", [(), (3,), (3, 5)])
def test_the_mixture_is_the_weighted_sum(lead: tuple[int, ...]) -> None:
    outputs = [torch.randn(*lead, 8) * 10**k for k in range(3)]
    for shape in {lead, lead[:1] + (1,) * (len(lead) - 1)}:
        weights = torch.randn(*shape, 3)
        torch.testing.assert_close(
            mix(weights, outputs).double(), mix_reference(weights, outputs), rtol=1e-5, atol=1e-5
        )


def test_the_masked_mean_leaves_padding_out() -> None:
    values, mask = torch.randn(2, 3, 4), torch.tensor([[1, 0, 0], [1, 1, 0]])
    rows: list[Tensor] = [values[0, 0], values[1, 0], values[1, 1]]
    torch.testing.assert_close(masked_mean(values, mask), torch.stack(rows).mean(0))
    torch.testing.assert_close(masked_mean(values, None), values.reshape(-1, 4).mean(0))
    assert torch.equal(masked_mean(values, torch.zeros(2, 3)), torch.zeros(4))
