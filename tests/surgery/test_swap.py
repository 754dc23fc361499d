"""Swapping: the function kept or the difference told, atomic, and taken back to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.norms import Norm, create_norm, norms
from normsmith.surgery import find_norms, restore_, swap_norms_
from tests.conftest import scramble
from tests.tiny import apart, example, is_norm, output, same_state, state, tiny

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(7))


class Two(nn.Module):
    """Two pre-norm residual layers."""

    def __init__(self, *kinds: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(kinds)
        self.linears = nn.ModuleList([nn.Linear(8, 8) for _ in kinds])

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x)).tanh()
        return x


def two(kind: str = "layernorm") -> Two:
    model = Two(*(create_norm(kind, 8) for _ in range(2)))
    assert isinstance(scramble(model), Two)
    return model


@pytest.mark.parametrize("old", list(norms))
@pytest.mark.parametrize("new", list(norms))
def test_the_reported_difference_is_that_of_the_outputs(old: str, new: str) -> None:
    model = two(old).eval()
    inputs: dict[str, Tensor] = {}
    for name, module in model.norms.named_children():
        module.register_forward_hook(lambda m, a, y, name=name: inputs.update({name: a[0]}))
    with torch.no_grad():
        model(X)
        before = {name: (inputs[name], model.norms[int(name)](inputs[name])) for name in inputs}
    report = swap_norms_(model, new, example=X)
    if old == new:
        assert report.swapped == ()
        return
    for site, old_class, kind, deviation in report.swapped:
        x, y = before[site.rpartition(".")[2]]
        with torch.no_grad():
            found = model.get_submodule(site)(x)
        assert (old_class, kind) == (norms.get(old).__name__, new)
        assert deviation == pytest.approx(float((found - y).norm() / y.norm()), rel=1e-4, abs=1e-7)
    text = str(report)
    assert f"{norms.get(old).__name__} → {new}" in text
    assert ("(the same function)" in text) == all(d <= 1e-5 for *_, d in report.swapped)


def test_options_are_written_as_on_a_command_line() -> None:
    report = swap_norms_(model := two("rmsnorm"), "layernorm:eps=0.25", example=X)
    assert [kind for _, _, kind, _ in report.swapped] == ["layernorm"] * 2
    assert {norm.config.eps for norm in model.norms} == {0.25}  # and not that of the norm that stood there


@pytest.mark.parametrize("training", [False, True])
def test_a_norm_that_comes_back_is_in_the_model_s_mode(training: bool) -> None:
    model = two("autonorm").train(not training)
    swap_norms_(model, "rmsnorm", example=X)
    model.train(training)
    restore_(model)
    assert all(module.training == training for module in model.modules())


def test_matching_helps() -> None:
    for kind in ("dyt", "scalenorm"):
        found = {}
        for init in ("match", "fresh"):
            report = swap_norms_(two("rmsnorm"), kind, init=init, example=X)
            found[init] = max(deviation for *_, deviation in report.swapped)
        assert found["match"] < found["fresh"]


def test_fresh_norms_have_their_own_initial_values_and_options() -> None:
    model = two()
    swap_norms_(model, {"kind": "rmsnorm", "eps": 0.25}, init="fresh", example=X)
    assert all((n.gamma == 1).all() and n.config.eps == 0.25 for n in model.norms)
    model = two()
    gammas = [norm.gamma for norm in model.norms]
    swap_norms_(model, {"kind": "rmsnorm", "eps": 0.25}, example=X)
    assert all(n.gamma is g and n.config.eps == 0.25 for n, g in zip(model.norms, gammas, strict=True))


@pytest.mark.parametrize("kind", list(norms))
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_restoring_after_training_gives_the_first_bits_of_the_norms(family: str, kind: str) -> None:
    model = tiny(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "norm" in name or "ln_" in name}
    swap_norms_(model, kind)
    ids = example(model)["input_ids"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    restore_(model)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_an_optimizer_from_before_goes_on_training_shared_parameters() -> None:
    model = tiny("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    swap_norms_(model, "rmsnorm")
    gains = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("gamma")}
    assert len(gains) == 5
    ids = example(model)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(not torch.equal(p, gains[name]) for name, p in model.named_parameters() if name in gains)


def test_swaps_are_taken_back_one_by_one() -> None:
    model = tiny("llama")
    first, before = output(model), state(model)
    swap_norms_(model, "layernorm", where="pre")
    second, middle = output(model), state(model)
    swap_norms_(model, "dyt", where="final")
    assert [name for name, _, _ in restore_(model).restored] == ["model.norm"]
    assert torch.equal(output(model), second)
    assert same_state(model, middle)
    assert len(restore_(model).restored) == 4
    assert torch.equal(output(model), first)
    assert same_state(model, before)
    with pytest.raises(InputError, match="nothing to restore"):
        restore_(model)
    swap_norms_(model, "dyt")
    with pytest.raises(InputError, match="nothing to restore"):
        restore_(copy.deepcopy(model))


class Sometimes(Norm):
    """Fits itself to the old norm, and fails at the second site."""

    Config = norms.get("scalenorm").Config
    sites = 0

    def __init__(self, width: int, config: Any = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma

    @torch.no_grad()
    def match(self, x: Tensor, y: Tensor) -> None:
        self.gamma.mul_(3)
        type(self).sites += 1
        if self.sites == 2:
            raise KeyboardInterrupt


def test_an_error_in_the_middle_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2").train()
    modules, before = dict(model.named_modules()), state(model)
    monkeypatch.setattr(Sometimes, "kind", "scalenorm", raising=False)
    monkeypatch.setitem(norms._classes, "scalenorm", Sometimes)
    with pytest.raises(KeyboardInterrupt):
        swap_norms_(model, "scalenorm")
    assert Sometimes.sites == 2
    assert dict(model.named_modules()) == modules
    assert same_state(model, before), "match had changed gains that old and new norm share"
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(InputError, match="nothing to restore"):
        restore_(model)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_restored_norms_follow_the_model(family: str) -> None:
    model = tiny(family)
    expected = state(copy.deepcopy(model).to("meta", torch.bfloat16))
    swap_norms_(model, "dyt", where="pre")
    swap_norms_(model, "rmsnorm", where="final")  # of Gemma: a float32 gain of its own in any case
    model.to("meta", torch.bfloat16)
    restore_(model)
    restore_(model)
    now = model.state_dict()
    assert {n: (t.device, t.dtype) for n, t in now.items()} == {n: (t.device, t.dtype) for n, t in expected.items()}


def test_an_error_in_the_model_leaves_no_hooks_and_its_modes() -> None:
    model = two().train()
    model.linears[1].eval()
    with pytest.raises(InputError, match="shape"):
        swap_norms_(model, "dyt", example=torch.randn(2, 9))
    assert [m.training for m in (model, model.linears[0], model.linears[1])] == [True, True, False]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (None, 9),
        ("pre", 4),
        ("qk", 4),
        ("final", 1),
        ("pre,final", 5),
        (["pre", "model.norm"], 5),
        ("model.layers.0.*", 4),
        ("*.input_layernorm", 2),
        (lambda site: site.width == 8, 4),
    ],
)
def test_where(where: Any, chosen: int) -> None:
    model = tiny("qwen3")
    before = {name: module for name, module in model.named_modules() if is_norm(module)}
    report = swap_norms_(model, "dyt", where=where)
    assert len(report.swapped) == chosen
    swapped = {name for name, *_ in report.swapped}
    assert all((model.get_submodule(name) is not module) == (name in swapped) for name, module in before.items())


def test_a_norm_with_two_names_stays_one_module() -> None:
    norm = nn.LayerNorm(8)
    model = Two(norm, norm)
    report = swap_norms_(model, "rmsnorm", example=X)
    assert len(report.swapped) == 1
    assert model.norms[0] is model.norms[1]
    assert isinstance(model.norms[0], norms.get("rmsnorm"))
    assert {name for name, _, _ in restore_(model).restored} == {"norms.0", "norms.1"}
    assert model.norms[0] is norm
    assert model.norms[1] is norm


class Gated(nn.Module):
    """A norm of two inputs, as gated linear attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight * nn.functional.rms_norm(x, (8,)) * torch.sigmoid(gate)


class GatedNorm(Gated):
    pass


class Odd(nn.Module):
    """Norms that no other norm could stand in for, beside one that is plain."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.gated = nn.LayerNorm(8), GatedNorm()
        self.channels, self.table = nn.GroupNorm(5, 5), nn.LayerNorm((5, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.plain(x))
        return self.table(self.channels(self.gated(x, x)))


def test_norms_that_no_other_can_replace_are_kept_with_the_reason() -> None:
    model = Odd()
    report = swap_norms_(model, "rmsnorm", example=X)
    assert [name for name, *_ in report.swapped] == ["plain"]
    kept = dict(report.kept)
    assert kept["gated"] == "is called with (a tensor, a tensor), not with one tensor"
    assert kept["channels"] == "normalises over 5 entries of another axis than the last, which has 8"
    assert "(5, 8)" in kept["table"]
    assert model(X).shape == X.shape


def test_keyword_calls_are_kept() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(input=x))

    model = Keyword()
    assert [(s.role, s.width) for s in find_norms(model, X)] == [("final", 8)]
    assert dict(swap_norms_(model, "rmsnorm", example=X).kept) == {
        "norm": "is called with (input=…), not with one tensor"
    }
    assert model(X).shape == X.shape


def test_models_on_the_meta_device_are_swapped_without_a_measurement() -> None:
    with torch.device("meta"):
        model = tiny("llama").__class__(tiny("llama").config)
    report = swap_norms_(model, "dyt")
    assert len(report.swapped) == 5
    assert all(deviation is None for *_, deviation in report.swapped)
    assert "not measured" in str(report)
    assert all(p.is_meta for p in model.parameters())


def test_bad_input_is_told_and_nothing_changes() -> None:
    model = two()
    before = dict(model.named_modules())
    cases: list[tuple[str, Any]] = [
        ("unknown norm 'rmsnrom'.*did you mean 'rmsnorm'", lambda: swap_norms_(model, "rmsnrom", example=X)),
        ("init must be 'match' or 'fresh'", lambda: swap_norms_(model, "dyt", init="zero", example=X)),
        ("no site matches where='qk'", lambda: swap_norms_(model, "dyt", where="qk", example=X)),
        ("an input for one forward pass", lambda: swap_norms_(model, "dyt")),
        ("takes a torch.nn.Module, got str", lambda: swap_norms_("gpt2", "dyt")),  # pyright: ignore
        ("no norm of a known kind", lambda: swap_norms_(nn.Linear(8, 8), "dyt", example=X)),
        ("eps", lambda: swap_norms_(model, {"kind": "rmsnorm", "eps": -1.0}, example=X)),
    ]
    for message, call in cases:
        with pytest.raises(InputError, match=message):
            call()
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bert", "qwen3"])
def test_layernorm_and_rmsnorm_take_over_the_trained_gains(family: str) -> None:
    model = tiny(family)
    scales = {s.name: s.facts.scale(s.module) for s in find_norms(model)}
    for kind in ("layernorm", "rmsnorm"):
        swap_norms_(model, kind)
        for name, scale in scales.items():
            torch.testing.assert_close(model.get_submodule(name).gamma.double(), scale, rtol=1e-6, atol=1e-6)
    assert apart(output(model), output(tiny(family))) < 2
