"""The fake norm against its formula: what each token is divided by, and what is collected."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor

from normsmith.norms import create_norm
from normsmith.norms.fakeln import FakeNorm
from normsmith.ops.statistics import layer_norm, rms_norm
from tests.conftest import scramble

KINDS = ("fakeln", "fakeln_rms")
X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))
FIRST = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]).bool()  # padded on the left by 0, 1, 2
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
END = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()


def made(kind: str, **state: float) -> FakeNorm:
    norm = scramble(create_norm(kind, 12))
    assert isinstance(norm, FakeNorm)
    for name, value in {"sigma": 0.7, "sigma_qk": 0.45, "sigma_first": 3.0, **state}.items():
        getattr(norm, name).fill_(value)
    return norm


def literal(norm: FakeNorm, x: Tensor, sigma: float, special: Tensor, fake: bool) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if norm.centred else x
    rows = []
    for row, flag in zip(x.reshape(-1, 12), special.reshape(-1), strict=True):
        divisor = (row.square().mean() + norm.config.eps).sqrt()
        if fake:
            divisor = torch.tensor(3.0 if flag else sigma)
        y = row / divisor * norm.gamma.double()
        rows.append(y if norm.beta is None else y + norm.beta.double())
    return torch.stack(rows).view(x.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("state", list(itertools.product([0, 1], repeat=4)))
def test_every_token_is_divided_by_what_its_kind_and_use_say(
    kind: str, given: bool, state: tuple[int, int, int, int]
) -> None:
    fake, fake_qk, keep_first, keep_end = state
    norm = made(kind, fake=fake, fake_qk=fake_qk, keep_first=keep_first, keep_end=keep_end).double()
    norm.split = norm._hooked = True
    first, end = torch.zeros(3, 5).bool(), torch.zeros(3, 5).bool()
    first[:, 0] = True
    if given:
        norm.first_tokens, norm.end_tokens = first, end = FIRST, END
    x = X.double() * 40
    y = norm(x)
    special = (first & bool(keep_first)) | (end & bool(keep_end))
    values = literal(norm, x, 0.7, special, bool(fake))
    torch.testing.assert_close(y, values, rtol=1e-6, atol=1e-9)  # σ is stored in float32
    torch.testing.assert_close(y, norm.reference(x), rtol=1e-10, atol=1e-10)
    keys = literal(norm, x, 0.45, first & bool(keep_first), bool(fake_qk))
    shift = 0 if norm.beta is None else norm.beta
    torch.testing.assert_close((y - shift) * norm.ratio + shift, keys, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_real_one_is_the_plain_norm(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    norm = made("fakeln_rms").to(dtype)
    assert torch.equal(norm(x), rms_norm(x, norm.gamma, 1e-6))
    norm = scramble(create_norm("fakeln_rms", 12, cast_first=True)).to(dtype)
    assert torch.equal(norm(x), rms_norm(x, norm.gamma, 1e-6, cast_first=True))
    norm = made("fakeln").to(dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(norm(x), layer_norm(x, norm.gamma, norm.beta, 1e-5), rtol=2 * eps, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flat", [True, False])
def test_statistics_leave_out_padding_and_first_tokens(kind: str, flat: bool) -> None:
    norm = made(kind).bfloat16().train()
    norm.first_tokens, norm.token_mask = FIRST, MASK
    sums, firsts = 0.0, 0.0
    for scale in (1.0, 5.0):
        x = (X * scale).bfloat16()
        norm(x.flatten(0, 1) if flat else x)
        wide = x.double() - (x.double().mean(-1, keepdim=True) if norm.centred else 0)
        sigma = (wide.square().mean(-1) + norm.config.eps).sqrt()
        sums += float(sigma[(MASK != 0) & ~FIRST].mean())
        firsts += float(sigma[FIRST].mean())
    assert norm.sum_sigma.dtype == torch.float32
    assert norm.sum_sigma.item() == pytest.approx(sums, rel=1e-5)
    assert norm.sum_first.item() == pytest.approx(firsts, rel=1e-5)
    assert norm.batches == 2
    norm.eval()(x)
    with torch.no_grad():
        norm.train()(x)
    assert norm.batches == 2, "neither evaluation nor a pass without gradients counts"


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_linear_once_every_use_is_fake_and_no_exception_left(kind: str) -> None:
    done = {"fake": 1, "fake_qk": 1, "sigma_qk": 0.7}
    norm = made(kind, **done).double()
    norm.split = norm._hooked = True
    form = norm.linear_form()
    assert form is not None
    x = X.double() + 3
    torch.testing.assert_close(form.apply(x), norm(x), rtol=1e-7, atol=1e-7)
    for change in ({"fake": 0}, {"fake_qk": 0}, {"keep_first": 1}, {"keep_end": 1}, {"sigma_qk": 0.6}):
        changed = made(kind, **{**done, **change})
        changed.split = changed._hooked = True
        assert changed.linear_form() is None, change
    assert made(kind, fake=1).linear_form() is not None, "a norm with one use needs no second"


def test_a_copy_and_a_stored_one_hold_no_batch() -> None:
    norm = made("fakeln", fake_qk=1)
    norm.split = norm._hooked = True
    norm.first_tokens = FIRST
    y = norm(X.requires_grad_())
    assert norm.ratio is not None
    for again in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert again.ratio is None
        assert again.first_tokens is None
        assert torch.equal(again.sigma_qk, norm.sigma_qk)
    assert y.requires_grad


def test_one_without_its_hooks_says_so_instead_of_computing_something_else() -> None:
    norm = made("fakeln", fake_qk=1)
    norm.split = True
    with pytest.raises(RuntimeError, match="saved while its norms were being removed"):
        norm(X)
    made("fakeln", fake=1, fake_qk=1, sigma_qk=0.7)(X)
