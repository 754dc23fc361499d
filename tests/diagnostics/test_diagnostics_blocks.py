"""Blocks, the stream through them, what they contribute, and attention sinks, against computations by hand."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normsmith.diagnostics import attention_sinks, depth_contribution, find_blocks, profile_stream
from normsmith.diagnostics.depth import token_loss
from normsmith.diagnostics.stream import angles
from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM, preset_config
from tests.conftest import scramble
from tests.tiny import FAMILIES, same_state, state, tiny

IDS = torch.randint(3, 60, (4, 14), generator=torch.Generator().manual_seed(2))
WINDOWS = list(IDS.split(3))  # the last batch is smaller
TEXT = [name for name in FAMILIES if name != "vit"]


def hidden(model: Any, ids: Tensor = IDS) -> list[Tensor]:
    """The stream by transformers' own account, without the last entry, which is after the final norm."""
    with torch.no_grad():
        return list(model(input_ids=ids, output_hidden_states=True).hidden_states[:-1])


def ours(**changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.2}
    model = NormsmithForCausalLM(preset_config("llama", **sizes, **changes))
    scramble(model)
    return model.eval()


@pytest.mark.parametrize("family", TEXT)
def test_blocks_of_every_family_are_found(family: str) -> None:
    model = tiny(family)
    blocks = find_blocks(model, IDS)
    assert len(blocks.modules) == 2
    assert model.get_submodule(blocks.name)[0] is blocks.modules[0]


def test_a_model_without_blocks_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(60, 8)
            self.parts = nn.ModuleList([nn.Linear(8, 4), nn.Linear(4, 8)])  # a list, but not on one stream

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.parts[1](self.parts[0](self.embed(input_ids)))

    with pytest.raises(InputError, match=r"Flat has no nn.ModuleList of blocks"):
        find_blocks(Flat(), IDS)


def made(name: str) -> Any:
    return tiny(name) if name in FAMILIES else ours(connection={"ours": "pre", "sphere": "proj"}[name])


@pytest.mark.parametrize("name", ["llama", "gpt2", "ours", "sphere"])
def test_norms_and_angles_equal_the_literal_formulas(name: str) -> None:
    model = made(name)
    profile = profile_stream(model, WINDOWS, probes=0)
    stream = [h.double() for h in hidden(model)]
    blocks = find_blocks(model, IDS)
    assert len(profile.layers) == len(blocks.modules) + 1
    for layer, h in zip(profile.layers, stream, strict=False):
        assert layer.norm == pytest.approx(float(h.norm(dim=-1).mean()), rel=1e-5)
        assert layer.rms == pytest.approx(math.sqrt(float(h.square().mean())), rel=1e-5)
    for layer, before, after in zip(profile.layers[1:], stream, stream[1:], strict=False):
        cosine = F.cosine_similarity(before, after, dim=-1)
        assert layer.cosine == pytest.approx(float(cosine.mean()), rel=1e-5)
        assert layer.angle == pytest.approx(float(cosine.acos().mean()), rel=1e-5)
    assert profile.tokens == IDS.numel()
    assert profile.layers[0].angle is None


def test_small_angles_survive() -> None:
    u = torch.randn(5, 16, dtype=torch.float64)
    v = torch.randn(5, 16, dtype=torch.float64)
    v = v - (u * v).sum(-1, keepdim=True) / (u * u).sum(-1, keepdim=True) * u
    turned = u + 1e-9 * v / v.norm(dim=-1, keepdim=True) * u.norm(dim=-1, keepdim=True)
    assert angles(u, turned)[0] == pytest.approx(1e-9, rel=1e-6)
    assert angles(u, -u)[0] == pytest.approx(math.pi)


def test_massive_activations_are_found_where_they_are() -> None:
    model = ours()

    def burst(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[1:2, 5, 7] = -1e3  # in the first batch of windows only: the second has one
        return output

    handle = model.model.layers[1].register_forward_hook(burst)
    layer = profile_stream(model, WINDOWS, probes=0).layers[2]
    handle.remove()
    assert (layer.position, layer.channel) == (5, 7)
    h = hidden(model, WINDOWS[0])[2].abs()
    h[1, 5, 7] = 1e3
    assert layer.massive == pytest.approx(1e3 / float(h.median()), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "ours", "sphere"])
def test_contribution_equals_the_loss_of_a_model_without_the_block(family: str) -> None:
    model = made(family)
    blocks = find_blocks(model, IDS)
    found = depth_contribution(model, WINDOWS, blocks)
    ids = IDS
    with torch.no_grad():
        whole = float(model(input_ids=ids, labels=ids).loss)
    assert token_loss(model, WINDOWS) == pytest.approx(whole, rel=1e-5)
    held = model.get_submodule(blocks.name)
    kept = list(held)
    for index, increase in enumerate(found):
        del held[index]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        expected = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())) - whole
        held.insert(index, kept[index])
        assert increase == pytest.approx(expected, abs=2e-5)
    assert max(abs(x) for x in found) > 1e-3


class Pairs(nn.Module):
    """Blocks of the older kind: the stream as `hidden_states`, and a tuple back."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, *, hidden_states: Tensor) -> tuple[Tensor, str]:
            return hidden_states + self.inner(hidden_states).tanh(), "weights"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])
        self.head = nn.Linear(16, 60)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, without: int | None = None) -> Any:
        h = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            new, note = block(hidden_states=h)
            assert note == "weights"
            h = h if index == without else new
        logits = self.head(h)
        return argparse.Namespace(loss=F.cross_entropy(logits.flatten(0, 1), input_ids.flatten()), logits=logits)


def test_blocks_that_return_tuples_and_models_that_are_not_transformers() -> None:
    model = Pairs()
    blocks = find_blocks(model, IDS)
    found = depth_contribution(model, WINDOWS, blocks)
    with torch.no_grad():
        losses = [float(model(IDS, without=index).loss) for index in (0, 1, 2, None)]
    assert found == pytest.approx([loss - losses[3] for loss in losses[:3]], abs=1e-6)
    assert max(map(abs, found)) > 1e-3
    profile = profile_stream(model, WINDOWS)
    assert profile.notes == ("attention sinks: the model's attention cannot be switched to eager, which keeps weights",)
    extremes = [layer.largest for layer in profile.layers[1:]]
    assert all(value is not None and value > 1 for value in extremes)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "ours"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_sinks_are_the_mean_weight_on_the_first_position(family: str, implementation: str) -> None:
    model = made(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=IDS, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    found = attention_sinks(model, WINDOWS)
    assert model.config._attn_implementation == implementation
    for (mean, most), w in zip(found, weights, strict=True):
        by_head = w[:, :, 1:, 0].double().mean((0, 2))
        assert mean == pytest.approx(float(by_head.mean()), rel=1e-5)
        assert most == pytest.approx(float(by_head.max()), rel=1e-5)
        assert most > mean


def test_what_cannot_be_measured_is_said_and_the_rest_is_there() -> None:
    headless = tiny("gpt2").transformer
    profile = profile_stream(headless, WINDOWS)
    assert profile.notes == ("contribution of blocks: GPT2Model gives no loss for labels that are its input ids",)
    assert [layer.skip for layer in profile.layers] == [None] * 3
    assert profile.layers[2].sink is not None
    assert profile.layers[2].largest is not None


def test_the_model_is_as_it_was() -> None:
    model = ours(norm="tapered_rmsnorm").train()
    model.model.layers[1].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    modes = {name: m.training for name, m in model.named_modules()}
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    before, implementation = state(model), model.config._attn_implementation
    profile_stream(model, WINDOWS)
    assert same_state(model, before)
    assert {name: m.training for name, m in model.named_modules()} == modes
    assert {name: p.requires_grad for name, p in model.named_parameters()} == wanted
    assert model.config._attn_implementation == implementation
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert [h for h in hooks if "normsmith" in h.__module__] == []  # transformers leaves those that collect attention
    assert all(p.grad is None for p in model.parameters())
