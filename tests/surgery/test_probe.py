"""What a norm computes: every norm class of transformers against a norm of our own, and modules that are no norms."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import random
from typing import Any

import pytest
import torch
import transformers.models
from torch import Tensor, nn

from normsmith.norms import Norm
from normsmith.norms.layernorm import LayerNorm, LayerNormConfig
from normsmith.norms.rmsnorm import RMSNorm, RMSNormConfig
from normsmith.surgery.probe import NormFacts, norm_facts
from tests.tiny import same_state, state

WIDTH = 24
FAMILIES = [
    name
    for line in (
        "afmoe aimv2 apertus arcee bamba bart bert bitnet bloom clip cohere cohere2 convnext dbrx deepseek_v2",
        "deepseek_v3 dinov2 distilbert ernie4_5 esm exaone4 falcon falcon_h1 gemma gemma2 gemma3 gemma3n glm glm4",
        "gpt2 gpt_neox gpt_oss gptj granite helium idefics2 internvl jamba jetmoe llama llama4 longt5 mamba",
        "mamba2 minimax mistral mixtral mllama modernbert moonshine mpt nemotron olmo olmo2 olmoe opt persimmon",
        "phi phi3 phimoe pixtral pop2piano qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma rwkv",
        "seed_oss siglip smollm3 stablelm starcoder2 switch_transformers t5 t5gemma umt5 vit whisper zamba zamba2",
    )
    for name in line.split()
]


def zoo() -> dict[str, type[nn.Module]]:
    """The classes with Norm in their name, once for each source text, since families copy each other's."""
    names = {module.name for module in pkgutil.iter_modules(transformers.models.__path__)}
    found: dict[str, type[nn.Module]] = {}
    for family in (f for f in FAMILIES if f in names):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for name, cls in vars(module).items():
            if isinstance(cls, type) and issubclass(cls, nn.Module) and "Norm" in name:
                if cls.__module__.startswith("torch."):
                    continue
                found[f"{family}.{name}"] = cls
    return {name: cls for name, cls in found.items() if cls.__module__.split(".")[2] == name.split(".")[0]}


def made(cls: Any) -> Any:
    """An instance with random parameters, or None for a class that wants more than a width and eps."""
    for arguments in ((WIDTH,), ()):
        try:
            norm = cls(*arguments)
        except (TypeError, AttributeError):
            continue
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.normal_()
        return norm
    return None


ZOO = {name: norm for name, cls in zoo().items() if (norm := made(cls)) is not None}
PLAIN = {name: facts for name, norm in ZOO.items() if (facts := norm_facts(norm, WIDTH)) is not None and facts.plain}


def twin(norm: nn.Module, facts: NormFacts) -> Norm:
    """One of our own norms as the facts describe the module."""
    gain, shift = facts.scale(norm), facts.shift(norm)
    eps, affine = facts.eps or 1e-30, facts.weight is not None
    if facts.centred:
        config = LayerNormConfig(eps=eps, affine=affine or shift is not None, bias=shift is not None)
        new: Any = LayerNorm(WIDTH, config)
    else:
        new = RMSNorm(WIDTH, RMSNormConfig(eps=eps, affine=affine, cast_first=facts.cast_first))
    if gain is not None:
        new.gamma.data = gain.float() if facts.offset else getattr(norm, facts.weight or "").data
    if shift is not None:
        new.beta.data = getattr(norm, facts.bias or "").data
    return new


def tokens(dtype: torch.dtype, size: float = 1.0) -> Tensor:
    return (size * (torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(6)) + 0.3)).to(dtype)


def test_the_zoo_is_large_enough() -> None:
    assert len(PLAIN) >= 40
    assert {f.kind for f in PLAIN.values()} == {"layernorm", "rmsnorm"}
    assert {f.offset for f in PLAIN.values()} == {0.0, 1.0}
    assert {f.cast_first for f in PLAIN.values()} == {True, False}


@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_the_facts_describe_the_module(name: str) -> None:
    norm, facts = ZOO[name], PLAIN[name]
    ours = twin(norm, facts)
    root = (facts.eps or 0.0) ** 0.5
    for size in (1.0, 100.0, 3 * root, root, 0.1 * root, 1e-3):
        x = tokens(torch.float32, size or 1.0)
        torch.testing.assert_close(norm(x), ours(x), rtol=2e-5, atol=2e-5 * float(norm(x).abs().max()))
    wide = copy.deepcopy(norm).double()
    x = tokens(torch.float64)
    torch.testing.assert_close(wide(x).double(), twin(wide, facts).double()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, facts in PLAIN.items() if facts.kind == "rmsnorm"])
def test_bfloat16_is_reproduced_to_the_bit(name: str) -> None:
    norm = copy.deepcopy(ZOO[name]).bfloat16()
    x = tokens(torch.bfloat16)
    y = norm(x)
    assert torch.equal(twin(norm, PLAIN[name])(x).to(y.dtype), y)


@pytest.mark.parametrize("name", ZOO)
def test_what_is_not_described_exactly_is_called_other(name: str) -> None:
    facts = norm_facts(ZOO[name], WIDTH)
    assert facts is not None, "a class with Norm in its name is at least listed"
    assert facts.plain or facts.kind == "other" or facts.eps_position != "inside"
    assert facts.kind == "other" or facts.eps is not None


@pytest.mark.parametrize("name", list(PLAIN)[::5])
def test_the_meta_device_and_any_dtype_give_the_same_facts(name: str) -> None:
    norm, facts = ZOO[name], PLAIN[name]
    assert norm_facts(copy.deepcopy(norm).to("meta"), WIDTH) == facts
    for dtype in (torch.bfloat16, torch.float64):
        assert norm_facts(copy.deepcopy(norm).to(dtype), WIDTH) == facts


def no_norms() -> dict[str, nn.Module]:
    from transformers.activations import ACT2CLS
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1)
    found: dict[str, nn.Module] = {
        name: getattr(nn, name)()
        for name in ("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "Identity", "Dropout", "PReLU", "Softplus", "ELU")
    }
    found |= {f"act {name}": cls() for name, cls in ACT2CLS.items() if isinstance(cls, type) and name != "xielu"}
    found |= {
        "Linear": nn.Linear(WIDTH, WIDTH),
        "Embedding": nn.Embedding(WIDTH, WIDTH),
        "Softmax": nn.Softmax(-1),
        "BatchNorm": nn.BatchNorm1d(WIDTH),
        "InstanceNorm": nn.InstanceNorm1d(WIDTH),
        "GroupNorm": nn.GroupNorm(4, WIDTH),
        "rotary": LlamaRotaryEmbedding(config),
        "mlp": LlamaMLP(config),
        "scale": Scale(),
        "standard deviation without mean": HalfCentred(),
        "l2": Unit(),
        "max": Largest(),
        "gated": Gated(),
        "two weights": TwoWeights(),
    }
    return found


class Scale(nn.Module):
    """A per-channel scale, as in LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class HalfCentred(Scale):
    """x over its standard deviation, without subtracting the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


class Gated(Scale):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.weight * nn.functional.rms_norm(x, (WIDTH,)) * torch.sigmoid(gate)


class TwoWeights(Scale):
    """An RMSNorm whose second parameter multiplies as well."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.other * self.weight * nn.functional.rms_norm(x, (WIDTH,), eps=1e-6)


@pytest.mark.parametrize("name", no_norms())
def test_what_is_no_layernorm_or_rmsnorm_is_not_taken_for_one(name: str) -> None:
    facts = norm_facts(no_norms()[name])
    assert facts is None or facts.kind == "other"


class Doubled(nn.LayerNorm):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.LayerNorm):
    """A subclass that computes the same."""


class Rms(nn.LayerNorm):
    """A LayerNorm by name that does not centre."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (WIDTH,), self.weight, 1e-4) + self.bias


class ChannelsFirst(nn.LayerNorm):
    """Normalises another axis than the last."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


def test_subclasses_are_judged_by_what_they_compute() -> None:
    assert norm_facts(Renamed(WIDTH, eps=1e-3)) == norm_facts(nn.LayerNorm(WIDTH, eps=1e-3))
    facts = norm_facts(Rms(WIDTH))
    assert facts is not None
    assert (facts.kind, facts.weight, facts.bias, facts.eps) == ("rmsnorm", "weight", "bias", 1e-4)
    for cls in (Doubled, ChannelsFirst):
        facts = norm_facts(cls(WIDTH))
        assert facts is not None
        assert facts.kind == "other"


class Eps(nn.Module):
    """An RMSNorm with eps where `position` says."""

    def __init__(self, position: str, eps: float, kept: bool, offset: float) -> None:
        super().__init__()
        self.gain, self.position, self.offset = nn.Parameter(torch.randn(WIDTH)), position, offset
        self.number = eps if kept else torch.tensor(eps)  # the attribute is a float, or only the measurement tells

    def forward(self, x: Tensor) -> Tensor:
        square = x.float().square().mean(-1, keepdim=True)
        if self.position == "inside":
            root = (square + self.number).sqrt()
        elif self.position == "outside":
            root = square.sqrt() + self.number
        else:
            root = square.sqrt().clamp_min(self.number)
        return ((self.offset + self.gain) * x.float() / root).to(x.dtype)


@pytest.mark.parametrize("position", ["inside", "outside", "floor"])
@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-5, 3e-4])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_eps_is_found_where_it_stands(position: str, eps: float, kept: bool, offset: float) -> None:
    facts = norm_facts(Eps(position, eps, kept, offset))
    assert facts is not None
    assert (facts.kind, facts.eps_position, facts.offset, facts.weight) == ("rmsnorm", position, offset, "gain")
    assert facts.eps == pytest.approx(eps, rel=1e-3)
    assert facts.plain == (position == "inside")


@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-5])
def test_a_shift_does_not_hide_a_small_eps(eps: float) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() + self.shift

    facts = norm_facts(Shifted())
    assert facts is not None
    assert (facts.kind, facts.weight, facts.bias) == ("rmsnorm", "gain", "shift")
    assert facts.eps == pytest.approx(eps, rel=1e-6)


def test_a_module_without_parameters_has_no_width_of_its_own() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    facts = norm_facts(Bare())
    assert facts is not None
    assert (facts.kind, facts.shape, facts.width) == ("rmsnorm", (), 0)
    given = norm_facts(Bare(), 40)
    assert given is not None
    assert given.width == 40


class Counting(nn.Module):
    """An RMSNorm that counts its calls, draws random numbers and keeps a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(WIDTH)), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.add_(1)
        torch.rand(3)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def test_probing_leaves_no_trace() -> None:
    norm = Counting().train()
    hooked: list[int] = []
    norm.register_forward_hook(lambda *args: hooked.append(1))
    before, parameter = state(norm), norm.weight
    states = torch.get_rng_state(), random.getstate()
    facts = norm_facts(norm)
    assert facts is not None
    assert facts.kind == "rmsnorm"
    assert norm.calls == 0
    assert hooked == []
    assert norm.weight is parameter
    assert parameter.grad is None
    assert same_state(norm, before)
    assert norm.training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_the_default_dtype_does_not_matter() -> None:
    module = transformers.models.llama.modeling_llama.LlamaRMSNorm(16)
    expected = norm_facts(module)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert norm_facts(module) == expected
    finally:
        torch.set_default_dtype(torch.float32)
