"""AutoNorm as a layer and inside models: what it computes, what it records, what it never sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import normsmith as ns
from normsmith.errors import InputError
from normsmith.models import (
    NormsmithForCausalLM,
    NormsmithForImageClassification,
    NormsmithVisionConfig,
    preset_config,
)
from normsmith.norms import create_norm, norm_config
from normsmith.norms.autonorm import AutoNorm
from normsmith.norms.layernorm import LayerNorm
from normsmith.ops.gate import gumbel_weights
from tests.conftest import scramble
from tests.tiny import apart, output, tiny

WIDTH = 12


def gated(**options: Any) -> AutoNorm:
    norm = scramble(create_norm("autonorm", WIDTH, **options), 1.0)
    assert isinstance(norm, AutoNorm)
    return norm


def language_model(**options: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = NormsmithForCausalLM(preset_config("gpt", **sizes, norm={"kind": "autonorm", **options}))
    scramble(model, 0.7)
    return model


THREE = ["layernorm", {"kind": "rmsnorm", "eps": 1e-3}, "dyt"]


@pytest.mark.parametrize("pool", ["token", "sequence"])
@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("candidates", [["layernorm", "dyt"], THREE])
@pytest.mark.parametrize("evaluation", ["soft", "argmax"])
def test_forward_and_gradients_equal_the_formula(pool: str, hard: bool, candidates: Any, evaluation: str) -> None:
    norm = gated(pool=pool, hard=hard, candidates=candidates, evaluation=evaluation, tau=0.6).double().eval()
    norm.token_mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    x = (3 * torch.randn(3, 5, WIDTH, dtype=torch.float64) + 1).requires_grad_()
    torch.testing.assert_close(norm(x), norm.reference(x), rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(x)
    wrt = (x, *norm.parameters())
    fast, literal = (
        torch.autograd.grad(y, wrt, upstream, allow_unused=True, materialize_grads=True)
        for y in (norm(x), norm.reference(x))
    )
    for a, b in zip(fast, literal, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("hard", [True, False])
def test_training_mixes_a_gumbel_sample_that_repeats_with_the_seed(hard: bool) -> None:
    norm, x = gated(hard=hard, tau=0.5).train(), torch.randn(3, 5, WIDTH)
    torch.manual_seed(1)
    y = norm(x)
    torch.manual_seed(1)
    assert torch.equal(norm(x), y)
    assert not torch.equal(norm(x), y)
    torch.manual_seed(1)
    pooled = norm.double().weights(x.double()).log()  # logits but for a constant, at temperature 1 or 0.5
    weights = gumbel_weights(pooled * (1 if hard else 0.5), torch.rand(3, 5, 2).double(), 0.5, hard)
    expected = sum(weights[..., k, None] * c.reference(x) for k, c in enumerate(norm.candidates))
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_hard_gate_gives_every_sample_one_candidate_and_trains_the_selector() -> None:
    norm, x = gated(pool="sequence").train(), torch.randn(64, 3, WIDTH)
    y = norm(x)
    each = torch.stack([candidate(x) for candidate in norm.candidates])
    taken = (y == each).flatten(2).all(-1)
    assert taken.any(0).all()
    assert taken.any(1).all(), "both candidates are drawn"
    y.square().mean().backward()
    for parameter in norm.selector_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


def test_evaluation_can_sample_and_is_noise_free_by_default() -> None:
    x = torch.randn(3, 5, WIDTH)
    assert torch.equal((norm := gated().eval())(x), norm(x))
    assert not torch.equal((norm := gated(evaluation="sampled").eval())(x), norm(x))


def test_zero_init_is_an_exactly_equal_mix() -> None:
    norm, x = create_norm("autonorm", WIDTH, zero_init=True, candidates=THREE).eval(), torch.randn(3, WIDTH)
    assert isinstance(norm, AutoNorm)
    torch.testing.assert_close(norm.weights(x), torch.full((3, 3), 1 / 3), rtol=1e-7, atol=0)
    torch.testing.assert_close(norm(x), sum(c(x) for c in norm.candidates) / 3)


def test_the_selector_has_the_published_size_and_start() -> None:
    norm = create_norm("autonorm", 128, pool="sequence", hidden=64)
    assert isinstance(norm, AutoNorm)
    assert sum(p.numel() for p in norm.selector_parameters()) == 8386
    for parameter, fan_in in zip(norm.selector_parameters(), (128, 128, 64, 64), strict=True):
        assert parameter.detach().abs().max() <= fan_in**-0.5
        assert parameter.numel() < 8 or parameter.detach().std() == pytest.approx((fan_in * 3) ** -0.5, rel=0.15)
    assert create_norm("autonorm", 128, pool="sequence").selector_in.shape == (32, 128)
    assert create_norm("autonorm", 128).selector_in.shape == (16, 128)
    assert create_norm("autonorm", 4).selector_in.shape == (1, 4)
    assert create_norm("autonorm", 128, hidden=5).selector_in.shape == (5, 128)


def test_the_record_holds_means_over_valid_tokens_in_training_only() -> None:
    norm, x = gated(), torch.randn(2, 4, WIDTH)
    norm.token_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    weights = norm.weights(x)[norm.token_mask != 0]
    entropy = -(weights * weights.log()).sum(-1).mean()
    norm.eval()(x)
    with torch.no_grad():
        norm.train()(x)
    assert float(norm.batches) == 0
    norm(x)
    norm(x)
    assert float(norm.batches) == 2
    torch.testing.assert_close(norm.weight_sum, 2 * weights.mean(0).detach())
    torch.testing.assert_close(norm.entropy_sum, 2 * entropy.detach())


def test_half_precision_rounds_neither_temperature_nor_frozen_weights() -> None:
    norm = gated(tau=0.3)
    norm.static_weights.copy_(torch.tensor([0.123456, 0.876544]))
    norm.bfloat16()
    assert norm.selector_in.dtype == torch.bfloat16
    assert float(norm.tau) == pytest.approx(0.3, abs=1e-7)
    assert float(norm.static_weights[0]) == pytest.approx(0.123456, abs=1e-7)


def test_later_tokens_leave_earlier_outputs_unchanged_to_the_bit() -> None:
    model = language_model().eval()
    ids = torch.randint(40, (2, 12))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1 + torch.randint(38, (2, 5))) % 40
    with torch.no_grad():
        a, b = model(ids).logits, model(changed).logits
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


def test_decoding_with_a_cache_equals_the_whole_pass() -> None:
    model, ids = language_model().eval(), torch.randint(40, (1, 6))
    with torch.no_grad():
        whole, cached = model(ids).logits, model(ids[:, :5])
        last = model(ids[:, 5:], cache=cached.cache).logits
    torch.testing.assert_close(last[:, -1], whole[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "norm",
    [
        {"kind": "autonorm", "pool": "sequence"},
        {"kind": "film", "pool": "sequence"},
        {"kind": "random_selector", "candidates": ["layernorm", {"kind": "adaln_self", "pool": "sequence"}]},
    ],
)
def test_a_causal_model_refuses_to_pool_over_the_sequence(norm: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"causal.*pool='token'"):
        preset_config("llama", hidden_size=16, num_attention_heads=2, norm=norm)
    with pytest.raises(InputError, match=r"GPT2LMHeadModel is causal.*pool='token'"):
        ns.swap_norms_(tiny("gpt2"), norm)


_GPT2: dict[str, Any] = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
_LLAMA: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "model",
    [
        transformers.GPT2Model(transformers.GPT2Config(**_GPT2)),
        transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**_GPT2)),
        transformers.LlamaForTokenClassification(transformers.LlamaConfig(**_LLAMA, intermediate_size=16)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_what_stands_on_a_decoder_refuses_it_too(model: Any) -> None:
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(InputError, match=rf"{type(model).__name__} is causal.*pool='token'"):
        ns.swap_norms_(model.eval(), {"kind": "autonorm", "pool": "sequence"}, where="final")
    assert {name: type(module) for name, module in model.named_modules()} == before
    ns.swap_norms_(model, "autonorm")


@pytest.mark.parametrize("training", [False, True])
def test_a_foreign_decoder_with_three_candidates_never_sees_the_future(training: bool) -> None:
    model = tiny("gpt2")
    ns.swap_norms_(model, {"kind": "autonorm", "candidates": THREE})
    scramble(model, 0.7)
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    model.train(training)
    ids = torch.randint(40, (2, 10))
    other = torch.cat((ids[:, :6], torch.randint(40, (2, 4))), dim=1)
    with torch.no_grad():
        found: list[torch.Tensor] = []
        for tokens in (ids, other):
            torch.manual_seed(1)  # the same noise at every place
            found.append(model(tokens).logits)
    assert torch.equal(found[0][:, :6], found[1][:, :6])
    assert not torch.equal(found[0][:, 6:], found[1][:, 6:])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_swap_starts_from_the_trained_norm(family: str) -> None:
    model = tiny(family)
    before = {name: module for name, module in model.named_modules() if "Norm" in type(module).__name__}
    report = ns.swap_norms_(model, {"kind": "autonorm", "candidates": ["dyt", "layernorm", "rmsnorm"]})
    place = 1 if family == "gpt2" else 2
    for name, old in before.items():
        new = model.get_submodule(name)
        assert isinstance(new, AutoNorm)
        heir = new.candidates[place]
        assert heir.gamma is old.weight, "an optimiser made before goes on training it"
        x = torch.randn(3, 7, 32)
        torch.testing.assert_close(heir(x), old(x), rtol=1e-5, atol=1e-5)
        assert len({id(p) for c in new.candidates for p in c.parameters()}) == sum(
            1 for c in new.candidates for _ in c.parameters()
        ), "no candidate shares its parameters with another"
        eps = old.eps if family == "gpt2" else old.variance_epsilon
        assert heir.config.eps == eps
    assert all(deviation is not None and deviation < 0.7 for *_, deviation in report.swapped)
    assert "autonorm" in str(ns.find_norms(model))
    assert len(ns.find_norms(model)) == len(before), "candidates are no sites of their own"
    ns.restore_(model)
    assert apart(output(model), output(tiny(family))) == 0


def test_the_candidates_of_the_command_line_and_of_yaml_are_the_same() -> None:
    assert norm_config({"kind": "autonorm", "candidates": "layernorm/rmsnorm"}) == norm_config(
        {"kind": "autonorm", "candidates": ["layernorm", {"kind": "rmsnorm"}]}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ["layernorm"]}, r"1 norm\(s\), and a choice needs at least two"),
        ({"candidates": ["layernorm", "layernorm"]}, "names layernorm twice"),
        ({"candidates": ["layernorm", "layernrm"]}, "did you mean 'layernorm'"),
        ({"candidates": ["layernorm", {"kind": "dyt", "width": 64}]}, "unknown key 'width'"),
        ({"candidates": ["layernorm", "tapered_rmsnorm"]}, "tapered_rmsnorm cannot be a candidate of autonorm"),
        ({"candidates": ["layernorm", "autonorm"]}, "autonorm cannot be a candidate of autonorm"),
        ({"tau": 0.0}, "tau = 0.0.*greater than 0"),
        ({"tau": -1.0}, "tau = -1.0.*greater than 0"),
        ({"tau_end": 0.0}, "tau_end = 0.0.*greater than 0"),
        ({"tau": 1e-45}, "tau=1e-45 lies beyond what float32 divides by; write a number from 1e-6 on"),
        ({"tau": math.inf}, "tau=inf lies beyond"),
        ({"tau_end": 1e-9}, "tau_end=1e-09 lies beyond"),
        ({"gate": "static", "tau_end": 0.5}, "leave tau_end out"),
        ({"pool": "batch"}, "pool = 'batch'"),
    ],
)
def test_bad_options_are_one_clear_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create_norm("autonorm", WIDTH, **options)


def test_a_static_gate_needs_no_selector() -> None:
    norm = create_norm("autonorm", WIDTH, gate="static")
    assert isinstance(norm, AutoNorm)
    assert norm.selector_parameters() == []
    norm.static_weights.copy_(torch.tensor([0.25, 0.75]))
    x = torch.randn(3, WIDTH)
    layernorm, dyt = norm.candidates
    for mode in (True, False):
        torch.testing.assert_close(norm.train(mode)(x), 0.25 * layernorm(x) + 0.75 * dyt(x))


def test_autocast_keeps_the_gate_in_float32() -> None:
    norm, x = gated().eval(), torch.randn(4, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(x), norm(x.clone()))
        inside = norm(x)
    assert torch.equal(inside, norm(x))


def test_a_candidate_of_an_optimised_model_is_the_old_layernorm() -> None:
    old = LayerNorm(WIDTH, eps=1e-3, bias=False)
    new = AutoNorm.from_site(old, WIDTH)
    layernorm, dyt = new.candidates
    assert isinstance(layernorm, LayerNorm)
    assert layernorm.gamma is old.gamma
    assert layernorm.config == old.config
    assert dyt.beta is None, "options that are not given come from the old norm"
    assert isinstance(dyt.gamma, nn.Parameter)
    assert dyt.gamma is not old.gamma


@pytest.mark.parametrize("pool", ["token", "sequence"])
def test_the_gates_of_a_vision_transformer_add_few_parameters(pool: str) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "image_size": 32, "patch_size": 4}
    counts = [
        NormsmithForImageClassification(NormsmithVisionConfig(**sizes, norm=norm)).num_parameters()
        for norm in ({"kind": "layernorm"}, {"kind": "autonorm", "pool": pool})
    ]
    assert 0 < counts[1] - counts[0] <= 0.07 * counts[0]
