"""Whole models with every connection: training, reloading, generating, compiling, the roles of their norms."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from normsmith.connections import Connection, connections
from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.models.blocks import Attention
from normsmith.norms import Norm, create_norm
from normsmith.surgery import find_norms, fold_, swap_norms_, taper_
from tests.connections.specs import SPECS, move

BLOCKS, VOCAB, D = 3, 60, 32
IDS = torch.randint(VOCAB, (4, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=list(SPECS))
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SPECS[request.param]


def small(connection: Any, preset: str = "llama", **changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "initializer_range": 0.1}
    return NormsmithForCausalLM(preset_config(preset, **{**sizes, "connection": connection, **changes}))


def train(model: NormsmithForCausalLM, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        model.normalize_weights_()
        losses.append(loss.item())
    return losses


def test_trains_reloads_and_generates(spec: dict[str, Any], tmp_path: Path) -> None:
    model = small(spec)
    move(model)
    losses = train(model.train())
    assert losses[-1] < 0.8 * losses[0]
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.connection_spec == model.config.connection_spec
    state = model.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    with_cache = again.generate(IDS[:, :5], use_cache=True, **options)
    assert torch.equal(again.generate(IDS[:, :5], use_cache=False, **options), with_cache)


def wanted_roles(model: NormsmithForCausalLM) -> dict[str, str]:
    """What the connections say; the last norm before the head is the final one, wherever it stands."""
    owners = [(name, m) for name, m in model.named_modules() if isinstance(m, Connection | Attention)]
    roles = {f"{name}.{site}": role for name, m in owners for site, role in m.roles().items()}
    if isinstance(model.model.entry, Norm):
        roles["model.entry"] = "embedding"
    last = "model.norm" if model.model.norm is not None else next(reversed(roles), None)
    return {**roles, last: "final"} if last else roles


def test_the_roles_of_norms_are_found(spec: dict[str, Any]) -> None:
    model = small(spec)
    assert {site.name: site.role for site in find_norms(model)} == wanted_roles(model)


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        ("pre", "pre pre pre pre pre pre final"),
        ("post", "post post post post post final"),
        ("peri", "embedding " + "pre sandwich " * 6 + "final"),
        ("keel", "pre post " * 5 + "pre final"),
        ("mixln, half", "post post pre pre pre pre final"),
        ("hybridnorm", "post qk qk qk " * 3 + "final"),
        ("hybridnorm*", "pre qk qk qk pre " + "post qk qk qk " * 2 + "final"),
        ("ngpt", ""),
        ("geonorm", "final"),
        ("sphere, p inf, all", ""),
    ],
)
def test_the_graph_of_norms(kind: str, roles: str) -> None:
    assert [site.role for site in find_norms(small(SPECS[kind]))] == roles.split()


# Aliases and options differ from their family in numbers only, and the contract compiles every `merge`.
_FAST = ("sphere", "ngpt", "hybridnorm*")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in _FAST else pytest.mark.slow)
        for kind in (*connections, "hybridnorm*", "geonorm", "pre, float32")
    ],
)
def test_compiled_equals_eager(kind: str) -> None:
    torch.compiler.reset()
    model = small(SPECS[kind], num_hidden_layers=1).eval()
    move(model)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["pre, float32", "keel, float32", "sphere", "ngpt"])
def test_the_stream_of_a_bfloat16_model_is_float32(kind: str) -> None:
    model = small(SPECS[kind]).to(torch.bfloat16)
    seen: list[torch.dtype] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    logits = model(IDS).logits
    assert seen == [torch.float32] * BLOCKS
    assert logits.dtype == torch.bfloat16
    narrow = small("pre").to(torch.bfloat16)
    narrow.model.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    narrow(IDS)
    assert seen[-1] == torch.bfloat16


@pytest.mark.parametrize("kind", list(connections))
def test_the_stream_under_autocast_is_float32(kind: str) -> None:
    model = small(kind)
    seen: list[torch.dtype] = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(IDS, labels=IDS).loss.backward()
    assert seen == [torch.float32] * BLOCKS


@torch.no_grad()
def test_a_wider_stream_loses_less() -> None:
    def error(connection: Any) -> float:
        torch.manual_seed(0)
        model = small(connection, num_hidden_layers=24, initializer_range=0.05).to(torch.bfloat16)
        model.model.embed_tokens.weight.mul_(50)  # small updates of a large stream
        exact = copy.deepcopy(model).double()(IDS).logits
        return float((model(IDS).logits.double() - exact).norm() / exact.norm())

    assert error({"kind": "pre", "float32": True}) < 0.7 * error("pre")


def spread(model: NormsmithForCausalLM, name: str) -> float:
    return float(torch.cat([p.detach().flatten() for n, p in model.named_parameters() if name in n]).std())


@pytest.mark.parametrize("preset", ["llama", "gpt"])
@pytest.mark.parametrize("kind", list(connections))
def test_initial_deviations(kind: str, preset: str) -> None:
    blocks = 8
    model = small(kind, preset, hidden_size=64, num_hidden_layers=blocks, num_attention_heads=4, initializer_range=0.02)
    deep, residual = (8 * blocks) ** -0.25, (2 * blocks) ** -0.5
    for role in ("q", "k", "v", "o", "up", "down", *(["gate"] if preset == "llama" else [])):
        factor = 1.0
        if kind == "deepnorm":
            factor = 1.0 if role in ("q", "k") else deep
        elif preset == "gpt" and kind != "lns" and role in ("o", "down"):
            factor = residual
        wanted = 0.02 * factor
        if kind == "ngpt":  # unit length along the 64 entries of the stream
            wanted = 64**-0.5
        assert spread(model, f".{role}_proj.weight") == pytest.approx(wanted, rel=0.03), role
    assert spread(model, "embed_tokens") == pytest.approx(64**-0.5 if kind == "ngpt" else 0.02, rel=0.05)


@pytest.mark.parametrize("norm", ["dyt", "derf", {"kind": "random_selector", "candidates": ["dyt", "derf"]}])
def test_embeddings_are_scaled_for_norms_that_have_no_statistics(norm: Any, tmp_path: Path) -> None:
    model = small("pre", norm=norm).eval()  # in which a random mixture is the mean of its candidates
    scale = model.model.embedding_scale
    assert scale is not None
    assert scale(torch.ones(D)).tolist() == pytest.approx([D**0.5] * D)
    assert len(list(scale.parameters())) == 1
    with torch.no_grad():
        scale.gamma.fill_(3.0)
    seen: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append(args[0]), with_kwargs=True)
    logits = model(IDS).logits
    torch.testing.assert_close(seen[0], 3 * model.model.embed_tokens(IDS))
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, logits)
    assert small("pre").model.embedding_scale is None
    assert small("pre", norm="autonorm").model.embedding_scale is None  # LayerNorm is among its candidates
    assert small("pre", norm=norm, embedding_scale=False).model.embedding_scale is None
    assert small("pre", embedding_scale=True).model.embedding_scale is not None


def test_a_slope_by_width_starts_by_the_place_of_the_norm(tmp_path: Path) -> None:
    model = small(
        "pre", hidden_size=2048, num_hidden_layers=1, intermediate_size=8, norm={"kind": "dyt", "alpha": "width"}
    )
    block = model.model.layers[0]
    connections_and_final = (block.attention_connection.norm, block.mlp_connection.norm, model.model.norm)
    assert [norm.alpha.item() for norm in connections_and_final] == [1.0, 0.5, 0.5]
    model.save_pretrained(tmp_path)
    assert model.config.norm_overrides is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.layers[0].mlp_connection.norm.config.place == "other"
    assert again.model.layers[0].attention_connection.norm.config.place == "attention"
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_slope_by_width_of_a_candidate_starts_by_the_place_too() -> None:
    norm = {"kind": "autonorm", "candidates": ["layernorm", {"kind": "dyt", "alpha": "width"}]}
    model = small("pre", hidden_size=2048, num_hidden_layers=1, intermediate_size=8, norm=norm)
    block = model.model.layers[0]
    sites = (block.attention_connection.norm, block.mlp_connection.norm, model.model.norm)
    assert [site.candidates[1].alpha.item() for site in sites] == [1.0, 0.5, 0.5]


def test_folders_written_before_the_new_options_load(tmp_path: Path) -> None:
    for number, (connection, norm) in enumerate([("sphere", "rmsnorm"), ("geo", "rmsnorm"), ("pre", "dyt")]):
        folder = tmp_path / str(number)
        model = small(connection, norm=norm, embedding_scale=False)
        move(model)
        model.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        old = {"kind": "pre"}
        if connection != "pre":  # all that `sphere` had
            old = {key: written["connection"][key] for key in ("kind", "p", "decay", "learn_radius", "rescale")}
            old["alpha"] = 1.0
        del written["embedding_scale"]
        (folder / "config.json").write_text(json.dumps({**written, "connection": old}))
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["peri", "keel", "hybridnorm", "hybridnorm*", "scalenorm", "mixln, half"])
def test_swapped_and_removed_norms_reload_as_they_are(kind: str, tmp_path: Path) -> None:
    model = small(SPECS[kind])
    swap_norms_(model, "layernorm")
    sites = list(find_norms(model))
    assert {site.kind for site in sites} == {"layernorm"}
    owner, _, leaf = sites[1].name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, None)
    setattr(model.model.layers[1].attention_connection, *_one_more(model))
    move(model)
    logits = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, logits)


@pytest.mark.parametrize(
    ("kind", "removed"),
    [
        ("peri", 6),
        ("mixln, half", 4),
        pytest.param("lns", 6, marks=pytest.mark.slow),
        pytest.param("keel", 6, marks=pytest.mark.slow),
        pytest.param("hybridnorm*", 2, marks=pytest.mark.slow),
    ],
)
def test_the_norms_before_sublayers_can_be_tapered_and_folded(kind: str, removed: int, tmp_path: Path) -> None:
    model = small(SPECS[kind])
    move(model)
    controller = taper_(model, steps=8)
    for _ in range(8):
        (model(IDS, labels=IDS).loss + controller.auxiliary_loss()).backward()
        controller.step()
    before = model.eval()(IDS).logits
    assert len(fold_(model).removed) == removed
    after = model(IDS).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, after)


def test_an_embedding_norm_that_was_taken_out_stays_out(tmp_path: Path) -> None:
    model = small("peri")
    model.model.entry = None
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.model.entry is None
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def _one_more(model: NormsmithForCausalLM) -> tuple[str, Any]:
    site = next(iter(model.model.layers[1].attention_connection.roles()))
    return site, create_norm("rmsnorm", D, eps=1e-3)


def test_a_tied_head_is_refused_where_the_method_has_none() -> None:
    assert small("ngpt").config.tie_word_embeddings is False
    assert small("pre").config.tie_word_embeddings is True
    with pytest.raises(InputError, match="connection 'ngpt' has no tied head; write tie_word_embeddings=False"):
        small("ngpt", tie_word_embeddings=True)
