"""Where gains and shifts go, what stands in the way, and that a failed fold leaves no trace."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from normsmith.errors import InputError, NotFoldableError, VerificationError
from normsmith.norms import create_norm, norms
from normsmith.norms.tapered import TaperedNorm
from normsmith.surgery import find_norms, fold, fold_, swap_norms_
from tests.tiny import apart, output, same_state, state, tiny

D = 8
X = torch.randn(3, 5, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def scrambled(model: Any) -> Any:
    for norm in (m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm | TaperedNorm)):
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 1.0, 0.5)
    return model.double()


class Pre(nn.Module):
    """x + linear(norm(x))."""

    def __init__(self, linear: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.linear = norm or nn.LayerNorm(D), linear

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_a_factor_on_the_way_is_counted_in_the_bias() -> None:
    class Scaled(Pre):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x) * -0.3 / 4)

    model = scrambled(Scaled(nn.Linear(D, D)))
    assert find_norms(model, X)[0].consumers[0].factor == pytest.approx(-0.075)
    weight, gain, before = model.linear.weight.clone(), model.norm.weight.clone(), model(X)
    fold_(model, "affine", example=X)
    assert torch.equal(model.linear.weight, weight * gain)
    assert apart(model(X), before) <= 1e-13


def test_only_the_rows_that_read_the_norm_change() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.weight, self.bias = nn.Parameter(torch.randn(3 * D, D)), nn.Parameter(torch.randn(3 * D))

        def forward(self, x: Tensor) -> Tensor:
            own = F.linear(self.norm(x), self.weight[D : 2 * D], self.bias[D : 2 * D])
            return own + F.linear(x, self.weight[2 * D :], self.bias[2 * D :])

    model = scrambled(Packed())
    weight, bias, before = model.weight.clone(), model.bias.clone(), model(X)
    fold_(model, "affine", example=X)
    rows = torch.arange(3 * D)
    inside = (rows >= D) & (rows < 2 * D)
    assert torch.equal(model.weight[~inside], weight[~inside])
    assert torch.equal(model.bias[~inside], bias[~inside])
    assert not (model.weight[inside] == weight[inside]).any()
    assert apart(model(X), before) <= 1e-13


def test_biases_are_created_where_the_shift_needs_one() -> None:
    model = scrambled(Pre(nn.Linear(D, D, bias=False)))
    shift, weight, before = model.norm.bias.clone(), model.linear.weight.clone(), model(X)
    fold_(model, "affine", example=X)
    assert isinstance(model.linear.bias, nn.Parameter)
    assert model.linear.bias.requires_grad
    torch.testing.assert_close(model.linear.bias, weight @ shift)
    assert apart(model(X), before) <= 1e-13
    assert "linear.bias" in model.state_dict()
    plain = scrambled(Pre(nn.Linear(D, D, bias=False), nn.RMSNorm(D, eps=1e-6)))
    fold_(plain, "affine", example=X)
    assert plain.linear.bias is None, "no shift, no bias"


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_is_made_without_gradients_can_be_trained(context: Any) -> None:
    model = scrambled(Pre(nn.Linear(D, D, bias=False)))
    with context():
        fold_(model, "affine", example=X)
        swap_norms_(model, "dyt", example=X)
    model(X).sum().backward()
    assert all(p.grad is not None and not p.is_inference() for p in model.parameters())


class Sandwich(nn.Module):
    """x + norm(linear(x))."""

    def __init__(self, linear: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = linear, norm

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


def linear_norm(kind: str) -> TaperedNorm:
    norm: Any = create_norm(kind, D)
    norm.gate.zero_()
    norm.gate_eval.zero_()
    norm.scale.fill_(0.7)
    return norm


@pytest.mark.parametrize("make", [lambda: nn.Linear(D, D), lambda: nn.Linear(D, D, bias=False), lambda: Conv1D(D, D)])
@pytest.mark.parametrize("kind", ["tapered_layernorm", "tapered_rmsnorm"])
def test_a_linear_sandwich_norm_goes_into_the_layer_before_it(kind: str, make: Any) -> None:
    model = scrambled(Sandwich(make(), linear_norm(kind)))
    if model.linear.bias is not None:
        nn.init.normal_(model.linear.bias)
    before, has_bias = model(X), model.linear.bias is not None
    (site,) = find_norms(model, X)
    assert (site.role, site.producer.module) == ("sandwich", "linear")
    assert fold_(model, example=X).removed == ("norm",)
    assert isinstance(model.norm, nn.Identity)
    assert (model.linear.bias is not None) == (has_bias or kind == "tapered_layernorm")
    assert apart(model(X), before) <= 1e-12


def test_a_producer_that_somebody_else_reads_is_left() -> None:
    class Branch(Sandwich):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return x + self.norm(y) + y

    class Twice(Sandwich):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x)) + self.linear(2 * x).tanh()

    class Tied(Sandwich):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x)) + F.embedding(torch.tensor([1]), self.linear.weight)

    for cls in (Branch, Twice, Tied):
        model = scrambled(cls(nn.Linear(D, D), linear_norm("tapered_rmsnorm")))
        before = state(model)
        with pytest.raises(InputError, match="also feeds the residual stream"):
            fold_(model, example=X)
        assert same_state(model, before), cls.__name__


def quantised(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to move this elsewhere
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class IntLinear(nn.Module):
    """A linear layer with an int8 weight and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-9, 9, (D, D), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * 0.1


def test_weights_that_must_not_change_give_the_reason() -> None:
    frozen = scrambled(Pre(nn.Linear(D, D)))
    frozen.linear.weight.requires_grad_(False)
    integers = Pre(IntLinear())
    meta = scrambled(Pre(nn.Linear(D, D))).to("meta")
    cases: list[tuple[nn.Module, Tensor, str]] = [
        (frozen, X, r"linear\.weight is frozen while other parameters are trained"),
        (integers, X.float(), r"linear\.weight is quantised \(Tensor, torch\.int8\): fold before quantising"),
    ]
    with pytest.raises(InputError, match=r"norm.weight has no values .on the meta device"):
        fold_(meta, "affine", example=X.to("meta"))
    for model, x, reason in cases:
        before = state(model)
        with pytest.raises(InputError, match=reason):
            fold_(model, "affine", example=x)
        with pytest.raises(NotFoldableError, match=reason):
            fold_(model, "affine", example=x, strict=True)
        assert same_state(model, before)


def test_dynamically_quantised_layers_are_left() -> None:
    model = quantised(Pre(nn.Linear(D, D)).eval())
    nn.init.normal_(model.norm.weight)
    before = model(X.float())
    with pytest.raises(InputError, match="nothing to fold"):
        fold_(model, "affine", example=X.float())
    assert torch.equal(model(X.float()), before)


def test_all_frozen_models_are_folded() -> None:
    model = scrambled(Pre(nn.Linear(D, D, bias=False))).requires_grad_(False)
    before = model(X)
    fold_(model, "affine", example=X)
    assert apart(model(X), before) <= 1e-13
    assert not any(p.requires_grad for p in model.parameters())


def test_strict_raises_for_what_could_have_been_folded_and_changes_nothing() -> None:
    model = tiny("gemma2")
    before = state(model)
    with pytest.raises(NotFoldableError, match=r"post_attention_layernorm: also feeds the residual stream"):
        fold_(model, "affine", strict=True)
    assert same_state(model, before)
    assert len(fold_(model, "affine", where="pre,final", strict=True).absorbed) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma", "gemma2", "opt"])
def test_half_precision_is_no_worse_than_the_rounding_of_the_model(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    exact = output(copy.deepcopy(model).double())
    before = apart(output(model).double(), exact)
    report = fold_(model, "affine")
    after = apart(output(model).double(), exact)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert after <= 2.5 * before + 2 * torch.finfo(dtype).eps
    assert report.error is not None
    assert report.error_before is not None
    assert report.error <= 4 * report.error_before + 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma", "llama", "bloom"])
def test_a_failed_verification_restores_everything(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family, **({"enable_bias": False} if family == "opt" else {}))
    before, config, logits = state(model), model.config.to_dict(), output(model)
    parameters, keys = dict(model.named_parameters()), dict(getattr(model, "all_tied_weights_keys", {}))
    modules = dict(model.named_modules())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    differences = iter([0.0, 1.0])  # of the model before, and after
    monkeypatch.setattr("normsmith.surgery.verify.difference", lambda *args: next(differences))
    with pytest.raises(VerificationError, match=r"changed the outputs by 1.0e\+00"):
        fold_(model, "affine", tolerance=1e-4)
    assert same_state(model, before)
    assert model.config.to_dict() == config
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert dict(model.named_modules()) == modules
    assert dict(getattr(model, "all_tied_weights_keys", {})) == keys
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert torch.equal(output(model), logits)


def test_an_error_half_way_restores_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    before, absorb, calls = state(model), fold.into_reader, []

    def fails(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError
        absorb(*args)

    monkeypatch.setattr(fold, "into_reader", fails)
    with pytest.raises(MemoryError):
        fold_(model, "affine")
    assert same_state(model, before)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_folding_again_says_that_it_is_done() -> None:
    for family in ("llama", "gemma"):
        model = tiny(family)
        fold_(model, "affine")
        before = state(model)
        report = fold_(model, "affine", verify=False)
        assert report.error is None
        after = state(model)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_has_nothing_to_give_says_so() -> None:
    model = Pre(nn.Linear(D, D), nn.LayerNorm(D, elementwise_affine=False)).double()
    with pytest.raises(InputError, match="has neither gain nor shift"):
        fold_(model, "affine", example=X)
    with pytest.raises(InputError, match="mode must be 'full' or 'affine', got 'all'"):
        fold_(model, "all", example=X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="mode='affine' moves gains and shifts only"):
        fold_(scrambled(Pre(nn.Linear(D, D))), example=X)


def test_the_head_is_not_untied_where_its_module_reads_another_ones_weight() -> None:
    class Borrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear, self.other = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x)) + x @ self.linear.weight

    (site,) = find_norms(scrambled(Borrowed()), X)
    assert site.untie == ()
    assert site.blocked == "linear reads other tensors too"


@pytest.mark.parametrize("kind", [kind for kind in norms if norms.get(kind).gain_last])
def test_every_norm_that_ends_with_a_gain_gives_it_to_its_readers(kind: str) -> None:
    model = Pre(nn.Linear(D, D)).double()
    model.norm = create_norm(kind, D).double()
    with torch.no_grad():
        for name, parameter in model.norm.named_parameters():
            parameter.add_(0.4 * torch.randn_like(parameter) if name in ("gamma", "beta") else 0)
    before = model(X)
    report = fold_(model, "affine", example=X)
    assert report.absorbed == ("norm",)
    assert bool((model.norm.gamma == 1).all())
    torch.testing.assert_close(model(X), before, rtol=1e-10, atol=1e-12)
