"""Who reads a norm: hand-written modules in which the output goes through views, slices, gathers and other detours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import BatchEncoding

from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.norms import create_norm
from normsmith.surgery import Site, find_norms, fold_
from normsmith.surgery.example import placed
from tests.tiny import apart, output, tiny

D = 8
X = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(5))


class Net(nn.Module):
    """One norm and some weights, used as `how` says."""

    def __init__(self, how: Callable[[Any, Tensor, Tensor], Tensor], kind: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.how = kind(D), how
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.packed, self.turned = nn.Parameter(torch.randn(3 * D, D)), nn.Parameter(torch.randn(D, D))
        self.packed_bias, self.narrow = nn.Parameter(torch.randn(3 * D)), nn.Linear(D // 2, D)
        self.gain, self.table = nn.Parameter(torch.randn(())), nn.Embedding(D, D)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, self.norm(x), x)


def scatter(net: Any, y: Tensor, x: Tensor) -> Tensor:
    flat = y.reshape(-1, D)
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))
    return net.a(flat[order])[order.argsort()].view_as(x)


def packed(net: Any, y: Tensor, x: Tensor) -> Tensor:
    q, k, v = (F.linear(y, w, b) for w, b in zip(net.packed.chunk(3), net.packed_bias.chunk(3), strict=True))
    return q * k.tanh() + v


FOLDABLE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "linear": lambda n, y, x: n.a(y),
    "two readers": lambda n, y, x: n.a(y) * n.b(y),
    "flattened tokens": lambda n, y, x: n.a(y.view(-1, D)).view_as(x),
    "transposed tokens": lambda n, y, x: n.a(y.transpose(0, 1)).transpose(0, 1),
    "some tokens": lambda n, y, x: n.a(y[:, 1:4]) + x[:, 1:4],
    "one token": lambda n, y, x: n.a(y[:, -1]),
    "shuffled tokens": scatter,
    "gathered tokens": lambda n, y, x: n.a(torch.gather(y, 1, torch.zeros(2, 3, D, dtype=torch.long))),
    "selected tokens": lambda n, y, x: n.a(y.index_select(1, torch.tensor([2, 0]))),
    "split and joined": lambda n, y, x: n.a(torch.cat(y.chunk(2, dim=1), dim=0)),
    "stacked": lambda n, y, x: n.a(torch.stack([y, y])).sum(0),
    "repeated": lambda n, y, x: n.a(y.repeat(2, 1, 1)),
    "expanded": lambda n, y, x: n.a(y[:, :1].expand(2, 6, D)),
    "features apart and back": lambda n, y, x: n.a(y.view(2, 6, 2, D // 2).flatten(2)),
    "halves and back": lambda n, y, x: n.a(torch.cat([y[..., : D // 2], y[..., D // 2 :]], -1)),
    "cast and back": lambda n, y, x: n.a(y.float().to(x.dtype)),
    "contiguous": lambda n, y, x: n.a(y.transpose(0, 1).contiguous()),
    "packed weight in slices": packed,
    "slice of a packed weight": lambda n, y, x: F.linear(y, n.packed[D : 2 * D], n.packed_bias[D : 2 * D]),
    "transposed weight": lambda n, y, x: y @ n.turned,
    "transposed twice": lambda n, y, x: y @ n.a.weight.t() + n.a.bias,
    "cast copy of a weight": lambda n, y, x: F.linear(y.float(), n.a.weight.float(), n.a.bias.float()).to(x.dtype),
    "einsum": lambda n, y, x: torch.einsum("btd,ed->bte", y, n.b.weight),
    "einsum, heads": lambda n, y, x: torch.einsum("btd,hed->bhte", y, n.packed.view(3, D, D)),
    "a constant factor": lambda n, y, x: n.a(y * 0.25),
    "a divisor": lambda n, y, x: n.a(y / 8**0.5),
    "a tensor factor": lambda n, y, x: n.a(y * torch.tensor(0.5)),
}


@pytest.mark.parametrize("kind", [nn.LayerNorm, lambda d: nn.RMSNorm(d, eps=1e-6)])
@pytest.mark.parametrize("how", FOLDABLE)
def test_detours_are_followed_and_folding_is_exact(how: str, kind: Any) -> None:
    model = Net(FOLDABLE[how], kind)
    site = find_norms(model, X)[0]
    assert site.blocked == ""
    assert site.consumers
    model = model.double()
    x = X.double()
    before = model(x)
    made = any(c.bias is None and not c.can_add_bias for c in site.consumers)
    if made and isinstance(model.norm, nn.LayerNorm):
        with pytest.raises(InputError, match="has no bias that could carry the norm's shift"):
            fold_(model, "affine", example=x)
        return
    fold_(model, "affine", example=x)
    assert (model.norm.weight == 1).all()
    assert apart(model(x), before) <= (1e-6 if "cast" in how else 1e-12)


BLOCKED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "residual": (lambda n, y, x: y + n.a(y), "also feeds the residual stream"),
    "returned": (lambda n, y, x: (n.a(y), y), "the model returns it"),
    "nonlinearity": (lambda n, y, x: n.a(torch.relu(y)), "relu"),
    "softmax": (lambda n, y, x: n.a(y.softmax(-1)), "softmax"),
    "attention without weights": (lambda n, y, x: n.a(y @ y.transpose(1, 2) @ y), "a product with activations or a"),
    "in place": (lambda n, y, x: n.a(y.add_(1.0)), "stream"),
    "in place on a view": (lambda n, y, x: [y[:, 0].zero_(), n.a(y)][1], "zero_"),
    "a part of the features": (lambda n, y, x: n.narrow(y[..., : D // 2]), "narrow reads a part of its features"),
    "features in another order": (lambda n, y, x: n.a(y.flip(-1)), "a reads a part of its features"),
    "tokens as features": (lambda n, y, x: n.a(y.transpose(1, 2)[..., :1].expand(2, D, D)), "part of its features"),
    "scaled by a parameter": (lambda n, y, x: n.a(y * n.gain), "mul"),
    "scaled by the input": (lambda n, y, x: n.a(y * x), "mul"),
    "sum over tokens": (lambda n, y, x: n.a(y.mean(1)), "mean"),
    "the weight reads others": (lambda n, y, x: n.a(y) + n.a(x), "a reads other tensors too"),
    "the weight of others": (lambda n, y, x: n.b(y) + n.table(torch.tensor([0])) @ n.b.weight, "b reads other tensors"),
    "joined with other tokens": (
        lambda n, y, x: n.a(torch.cat([y, n.table(torch.arange(3)).expand(2, 3, D)], 1)), "a reads"),
    "nobody reads it": (lambda n, y, x: n.a(x), "no linear layer reads it"),
}  # fmt: skip


@pytest.mark.parametrize("how", BLOCKED)
def test_other_readers_block_with_the_reason(how: str) -> None:
    function, reason = BLOCKED[how]
    model = Net(function)
    before = {n: p.clone() for n, p in model.named_parameters()}
    site = find_norms(model, X)[0]
    assert site.blocked
    assert reason in site.blocked
    with pytest.raises(InputError, match="nothing to fold"):
        fold_(model, "affine", example=X)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_norm_that_does_not_run_says_so() -> None:
    class Idle(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x)

    assert find_norms(Idle(FOLDABLE["linear"]), X)[0].blocked == "never ran on the example"


def test_a_norm_used_twice_has_all_its_readers() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(x + self.a(self.norm(x))))

    model = Twice(FOLDABLE["linear"], lambda d: nn.RMSNorm(d, eps=1e-6)).double()
    site = find_norms(model, X.double())[0]
    assert site.readers == ("a", "b")
    before = model(X.double())
    fold_(model, "affine", example=X.double())
    assert apart(model(X.double()), before) <= 1e-12


def test_shared_modules_are_listed_once_with_all_their_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(self.first(x))
            return x + self.b(self.second(x))

    (site,) = find_norms(Shared(), X)
    assert site.names == ("first", "second")
    assert site.readers == ("a", "b")
    assert site.to_dict()["names"] == ["first", "second"]


class Experts(nn.Module):
    """A router that sends everything to expert 0; the others are idle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, D)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(3)])
        self.chosen = 0
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[self.chosen](self.norm(x))


def test_experts_that_the_example_did_not_reach_are_readers_too() -> None:
    model = Experts().double()
    x = X.double()
    assert find_norms(model, x)[0].readers == ("experts.0.0", "experts.1.0", "experts.2.0")
    before = []
    for model.chosen in range(3):
        before.append(model(x))
    model.chosen = 0
    fold_(model, "affine", example=x)
    for model.chosen in range(3):
        assert apart(model(x), before[model.chosen]) <= 1e-12


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("tied", [False, True])
def test_heads_tied_or_behind_soft_capping(cap: float | None, tied: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(20, D), nn.Linear(D, D)
            self.pre, self.final, self.head = nn.RMSNorm(D, 1e-6), nn.RMSNorm(D, 1e-6), nn.Linear(D, 20, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            logits = self.head(self.final(x + self.block(self.pre(x))))
            return logits if cap is None else cap * torch.tanh(logits / cap)

    pre, final = find_norms(Model(), torch.randint(20, (2, 6)))
    assert (pre.role, final.role) == ("pre", "final")
    assert final.untie == (("head",) if tied else ())
    assert final.blocked == ""


class Attention(nn.Module):
    """torch's own attention, reading its norm as queries, keys and values, or as queries alone."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.norm, self.cross = nn.LayerNorm(D), cross
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm(x)
        other = memory if self.cross else y
        return x + self.attention(y, other, other, need_weights=False)[0]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_packed_projections_of_torch_attention(cross: bool, training: bool) -> None:
    model = Attention(cross).double().train(training)
    example = (X.double(), torch.randn(2, 4, D, dtype=torch.float64))
    (site,) = find_norms(model, example)
    assert site.role == "pre"
    rows = sorted(consumer.bounds[0] for consumer in site.consumers)
    assert (rows[0][0], rows[-1][1]) == (0, D if cross else 3 * D)
    before, packed = model(*example), model.attention.in_proj_weight.clone()
    fold_(model, "affine", example=example)
    assert apart(model(*example), before) <= 1e-12
    assert torch.equal(model.attention.in_proj_weight[D:], packed[D:]) == cross


def test_modes_and_hooks_are_as_before_and_user_hooks_run() -> None:
    model = tiny("gpt2").train()
    model.transformer.h[0].attn.eval()
    modes = {name: m.training for name, m in model.named_modules()}
    calls: list[str] = []
    handle = model.transformer.h[1].ln_1.register_forward_hook(lambda *a: calls.append("ran"))
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    find_norms(model)
    assert calls == ["ran"]
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()} == hooks
    handle.remove()


def test_an_error_in_the_forward_pass_leaves_nothing_behind() -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.a(self.norm(x))
            raise ValueError("no such luck")

    model = Fails(FOLDABLE["linear"]).train()
    model.b.eval()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(InputError, match="no such luck"):
        find_norms(model, X)
    assert [model.training, model.a.training, model.b.training] == [True, True, False]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert find_norms(Net(FOLDABLE["linear"]), X)[0].readers == ("a",), "and no mode stays on"


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3", "bert"])
def test_gradient_modes_change_nothing(family: str) -> None:
    model = tiny(family)
    plain = str(find_norms(model))
    before = torch.get_rng_state()
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            assert str(find_norms(model)) == plain
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "qwen3", "opt", "bert"])
def test_the_meta_device_shows_the_same_structure(family: str) -> None:
    model = tiny(family)
    with torch.device("meta"):
        twin = type(model)(model.config).eval()

    def shape(site: Site) -> tuple[Any, ...]:
        return site.name, site.kind, site.role, site.width, site.facts.eps, site.readers, site.blocked

    assert [shape(s) for s in find_norms(twin)] == [shape(s) for s in find_norms(model)]


def test_an_example_follows_the_model_to_its_device() -> None:
    model, ids = tiny("llama").to("meta"), torch.randint(40, (2, 6))
    for sample in ({"input_ids": ids, "use_cache": False}, (ids, None), BatchEncoding({"input_ids": ids}), ids):
        there = tree_leaves(placed(model, sample))
        assert [t.device.type for t in there if isinstance(t, Tensor)] == ["meta"], type(sample)
        assert [t for t in there if not isinstance(t, Tensor)] == [
            t for t in tree_leaves(dict(sample) if isinstance(sample, BatchEncoding) else sample) if t is not ids
        ]
    assert placed(nn.Identity(), ids) is ids


def test_an_identity_is_told_apart_from_its_input() -> None:
    model = Net(lambda n, y, x: x + n.a(y), lambda d: create_norm("identity", d))
    assert [(s.role, s.blocked) for s in find_norms(model, X)] == [("pre", "")]
    before = model(X)
    assert fold_(model, example=X).removed == ("norm",)
    assert torch.equal(model(X), before)


def test_found_models_compute_what_they_did() -> None:
    model = tiny("llama")
    before = output(model)
    find_norms(model)
    assert torch.equal(output(model), before)


@pytest.mark.parametrize("kind", ["rmsnorm", "dyt", "autonorm", "film", "random_selector"])
def test_a_default_device_of_the_caller_changes_nothing(kind: str) -> None:
    """Models that are only planned are built, and looked at, under `torch.device("meta")`."""
    config = preset_config("llama", hidden_size=16, num_hidden_layers=1, vocab_size=50, norm=kind)
    expected = str(find_norms(NormsmithForCausalLM(config)))
    with torch.device("meta"):
        assert str(find_norms(NormsmithForCausalLM(config))) == expected
