"""Norms removed one after the other: the schedule, the controller, and queries and keys apart from values."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import normsmith as ns
from normsmith.errors import DivergedError, InputError
from normsmith.norms.fakeln import FakeNorm
from normsmith.schedules import OneByOneController, SequentialConfig
from normsmith.schedules.sequential import Uses
from normsmith.surgery.attention import query_key_rows, query_rows
from normsmith.surgery.export import export_model
from tests.tiny import apart, tiny

IDS = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))
IDS[1, 5] = IDS[2, 0] = IDS[3, 11] = 2  # end of text
CONFIG = SequentialConfig(start_step=3, gaps=(1, 1, 2), waits=(1, 2))
LAST = 3 + 2 + 2 + 4 + 3  # two blocks: MLPs, queries and keys, values, final norm, both exceptions


def model_of(family: str = "gpt2", **changes: Any) -> Any:
    model = tiny(family, **changes)
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if family == "opt":
        for layer in model.model.decoder.layers:
            layer.dropout = 0.0
        model.model.decoder.dropout = 0.0
    return model.train()


def train(model: Any, controller: OneByOneController, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(steps):
        for micro in IDS.chunk(2):
            loss = model(input_ids=micro, labels=micro).loss
            ((loss + controller.auxiliary_loss()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


# Where queries and keys stand among the outputs of each reader: 4 heads of 8, llama and its like with 2 key heads.
NEOX = torch.tensor([1] * 16 + [0] * 8).bool().repeat(4)
ALL, NONE = torch.ones(32).bool(), torch.zeros(48).bool()
LAYOUTS: dict[str, dict[str, Tensor]] = {
    "gpt2": {"c_attn": torch.arange(96) < 64, "c_fc": torch.zeros(128).bool()},
    "gpt_neox": {"query_key_value": NEOX, "dense_h_to_4h": NONE},
    "bloom": {"query_key_value": NEOX, "dense_h_to_4h": torch.zeros(128).bool()},
    "opt": {"q_proj": ALL, "k_proj": ALL, "v_proj": ~ALL, "fc1": NONE},
    "llama": {"q_proj": ALL, "k_proj": ALL[:16], "v_proj": ~ALL[:16], "gate_proj": NONE, "up_proj": NONE},
    "qwen3": {"q_proj": ALL, "k_proj": ALL[:16], "v_proj": ~ALL[:16], "gate_proj": NONE, "up_proj": NONE},
}
FIRST_ROWS = {
    "gpt2": torch.arange(96) < 32,
    **dict.fromkeys(("gpt_neox", "bloom"), torch.tensor([1] * 8 + [0] * 16).bool().repeat(4)),
}


def readers(model: nn.Module) -> dict[str, nn.Module]:
    return {r: model.get_submodule(r) for s in ns.find_norms(model) if s.role == "pre" for r in s.readers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", LAYOUTS)
def test_queries_and_keys_are_found_by_what_they_do(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = query_key_rows(model, readers(model))
    assert len(found) == 2 * len(LAYOUTS[family])
    for name, rows in found.items():
        assert torch.equal(rows, LAYOUTS[family][name.rpartition(".")[2]]), name
    for name, rows in query_rows(model, readers(model)).items():
        leaf = name.rpartition(".")[2]
        assert torch.equal(rows, FIRST_ROWS.get(family, ALL)) == (leaf in ("c_attn", "query_key_value", "q_proj"))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def watched(model: Any, modules: dict[str, nn.Module]) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output of each module in one pass over IDS."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda m, a, y, name=name: seen.update({name: (a[0], y)}))
        for name, module in modules.items()
    ]
    model(input_ids=IDS)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt", "llama", "qwen3"])
def test_queries_and_keys_get_one_version_of_the_norm_and_values_another(family: str) -> None:
    model = model_of(family).double()
    controller = ns.remove_one_by_one_(model, CONFIG, steps=40)
    assert not controller.reasons
    name = controller.uses.attention[1]
    norm = controller.sites[name]
    for state in ({"fake_qk": 1.0}, {"fake_qk": 1.0, "fake": 1.0}):
        for key, value in {"sigma": 0.9, "sigma_qk": 0.4, "sigma_first": 2.0, **state}.items():
            getattr(norm, key).fill_(value)
        owners = {r: m for r, m in readers(tiny(family)).items() if ".1." in r}
        seen = watched(model, {r.rpartition(".")[2]: model.get_submodule(r) for r in owners} | {"norm": norm})
        x = seen["norm"][0].detach()
        x = x - (x.mean(-1, keepdim=True) if norm.centred else 0)
        sigma = (x.square().mean(-1, keepdim=True) + norm.config.eps).sqrt()
        first = torch.zeros(IDS.shape).bool()
        first[:, 0] = True

        def version(special: Tensor, constant: float, x: Tensor = x) -> Tensor:
            divisor = torch.where(special[..., None], 2.0, constant)
            y = x / divisor * norm.gamma
            return y if norm.beta is None else y + norm.beta

        keys = version(first, float(norm.sigma_qk))
        real = x / sigma * norm.gamma + (0 if norm.beta is None else norm.beta)
        values = version(first | (IDS == 2), float(norm.sigma)) if norm.fake else real
        for reader, stock in owners.items():
            leaf = reader.rpartition(".")[2]
            if leaf not in LAYOUTS[family] or not (leaf == "v_proj" or LAYOUTS[family][leaf].any()):
                continue
            stock = stock.double()
            expected = torch.where(LAYOUTS[family][leaf], stock(keys), stock(values))
            torch.testing.assert_close(seen[leaf][1], expected, rtol=1e-6, atol=1e-8)
            assert norm.fake == 0 or apart(seen[leaf][1], stock(real)) > 0.05, "the test would see nothing"


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize("placement", ["all", "internal"])
def test_the_whole_way_and_folding(family: str, placement: Any) -> None:
    model = model_of(family).double()
    reference = copy.deepcopy(model)
    config = CONFIG.model_copy(update={"placement": placement})
    controller = ns.remove_one_by_one_(model, config, steps=40)
    # In float64 as far as the norms of transformers keep it.
    assert apart(model(input_ids=IDS).logits, reference(input_ids=IDS).logits) < 1e-6
    order: list[tuple[int, str]] = []
    optimizer = sgd(model)
    for step in range(1, 20):
        before = {n: (float(m.fake), float(m.fake_qk)) for n, m in controller.sites.items()}
        train(model, controller, 1, optimizer)
        order += [(step, n) for n, m in controller.sites.items() if (float(m.fake), float(m.fake_qk)) != before[n]]
    mlp, attention, final = controller.uses.mlp, controller.uses.attention, controller.uses.final
    assert len(final) == (placement == "all")
    expected = list(zip((3, 4, 5, 6, 7, 9, 11), (*mlp, *attention, *attention, *final), strict=False))
    assert order == expected
    assert controller.progress() == {"gate": 0.0, "exceptions": 0.0}
    whole = copy.deepcopy(model).eval()
    with torch.no_grad():
        logits = whole(input_ids=IDS).logits
        report = ns.fold_(model.eval())
        assert apart(model(input_ids=IDS).logits, logits) < 1e-10
    assert len(report.removed) == 4 + len(final)
    assert not any(isinstance(m, FakeNorm) for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_the_constant_between_the_uses_moves_into_the_weights(family: str) -> None:
    model = model_of(family).double()
    controller = ns.remove_one_by_one_(model, CONFIG, steps=40)
    for i, norm in enumerate(controller.sites.values()):
        norm.fake.fill_(1.0)
        norm.fake_qk.fill_(1.0)
        norm.sigma.fill_(0.3 + 0.1 * i)
        norm.sigma_qk.fill_(0.95 - 0.1 * i)
        norm.keep_first.zero_()
        norm.keep_end.zero_()
    model.eval()
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        assert all(controller.sites[n].linear_form() is None for n in controller.uses.attention)
        for split in controller.splits.values():
            split.settle()
        assert apart(model(input_ids=IDS).logits, before) < 1e-12
        assert all(controller.sites[n].linear_form() is not None for n in controller.uses.attention)
        controller.close()
        assert not any(m._forward_hooks for m in model.modules())
        assert apart(model(input_ids=IDS).logits, before) < 1e-12


def test_sigma_is_the_running_mean_when_its_turn_comes() -> None:
    model = model_of()
    controller = ns.remove_one_by_one_(model, CONFIG.model_copy(update={"momentum": 0.3}), steps=40)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in controller.sites}

    def watch(name: str, norm: FakeNorm) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            x = args[0].detach().double()
            s = ((x - x.mean(-1, keepdim=True)).square().mean(-1) + norm.config.eps).sqrt()
            seen[name].append((float(s[:, 1:].mean()), float(s[:, 0].mean())))

        return norm.register_forward_hook(hook)

    handles = [watch(*item) for item in controller.sites.items()]
    train(model, controller, LAST, sgd(model, 0.05))
    for handle in handles:
        handle.remove()

    def average(name: str, step: int, which: int) -> float:
        s = 0.0
        values = [v[which] for v in seen[name]]
        for a, b in zip(values[: 2 * step : 2], values[1 : 2 * step : 2], strict=True):
            s = 0.7 * s + 0.3 * (a + b) / 2
        return s / (1 - 0.7**step)

    turns = {r.name: r.step for r in CONFIG.plan(40, controller.uses) if r.what in ("whole", "v")}
    for name, norm in controller.sites.items():
        assert float(norm.sigma) == pytest.approx(average(name, turns[name], 0), rel=1e-5)
        early = {r.name: r.step for r in CONFIG.plan(40, controller.uses) if r.what in ("whole", "qk")}[name]
        assert float(norm.sigma_first) == pytest.approx(average(name, early, 1), rel=1e-5)


def test_the_auxiliary_loss_pulls_all_tokens_to_the_mean_of_ordinary_ones() -> None:
    model = model_of()
    controller = ns.remove_one_by_one_(model, CONFIG.model_copy(update={"scale_loss": 0.5}), steps=40)
    seen: list[Tensor] = []
    model.transformer.ln_f.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    model(input_ids=IDS, attention_mask=mask)
    loss = controller.auxiliary_loss()
    assert isinstance(loss, Tensor)
    assert loss.requires_grad
    h = seen[0].double()
    sigma = (h - h.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    first = torch.zeros_like(IDS).bool()
    first[1:, 0] = first[0, 3] = True
    ordinary = (mask != 0) & ~first & (IDS != 2)
    expected = 0.5 * (sigma - sigma[ordinary].mean()).square()[mask != 0].mean()
    assert loss.item() == pytest.approx(float(expected), rel=1e-4)
    assert controller.auxiliary_loss() == 0.0, "one forward pass counts once"
    norm = next(iter(controller.sites.values()))
    assert norm.first_tokens is not None
    assert torch.equal(norm.first_tokens, first)


@pytest.mark.parametrize("stop", [1, 6, 10, LAST, LAST + 2])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_stopped_and_resumed_runs_have_the_same_numbers(family: str, stop: int) -> None:
    first = model_of(family)
    twin = copy.deepcopy(first)
    controller = ns.remove_one_by_one_(first, CONFIG, steps=40)
    losses = train(first, controller, LAST + 4, sgd(first, 1e-2))
    controller = ns.remove_one_by_one_(twin, CONFIG, steps=40)
    begun = train(twin, controller, stop, sgd(twin, 1e-2))
    second = model_of(family)
    again = ns.remove_one_by_one_(second, CONFIG, steps=40)
    second.load_state_dict(twin.state_dict())
    again.load_state_dict(controller.state_dict())
    assert begun + train(second, again, LAST + 4 - stop, sgd(second, 1e-2)) == losses
    other = ns.remove_one_by_one_(model_of(family), SequentialConfig(start_step=4, gaps=(1, 1, 1)), steps=40)
    with pytest.raises(InputError, match="another start_step, gaps, waits: resume with the same schedule"):
        other.load_state_dict(controller.state_dict())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_one_compilation_for_a_whole_removal(family: str) -> None:
    model = model_of(family)
    controller = ns.remove_one_by_one_(model, CONFIG, steps=LAST)
    compilations, first = [], 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = sgd(model)
    for _ in range(LAST):
        with torch.compiler.set_stance("force_eager"):
            reference = copy.deepcopy(model)(input_ids=IDS).logits
        logits = compiled(input_ids=IDS).logits  # the loss of transformers logs, which breaks a graph
        torch.testing.assert_close(logits, reference, rtol=1e-5, atol=1e-5)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        (loss + controller.auxiliary_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()
        first = first or len(compilations)
    # The hook that sees the tokens is a graph of its own, because it runs before the model does.
    assert len(compilations) == first <= 2
    assert controller.progress()["gate"] == 0


def test_a_cache_keeps_the_first_token_in_its_place() -> None:
    model = model_of("llama").eval()
    controller = ns.remove_one_by_one_(model, CONFIG, steps=40)
    for norm in controller.sites.values():
        norm.fake.fill_(1.0)
        norm.fake_qk.fill_(1.0)
        norm.sigma_first.fill_(4.0)
    with torch.no_grad():
        whole = model(input_ids=IDS, use_cache=False).logits
        begun = model(input_ids=IDS[:, :7], use_cache=True)
        rest = model(input_ids=IDS[:, 7:], cache=begun.cache, use_cache=True).logits
    assert apart(rest, whole[:, 7:]) < 1e-5


def test_readers_that_cannot_be_told_apart_make_the_site_go_whole() -> None:
    model = ns.NormsmithForCausalLM(
        ns.preset_config("llama", vocab_size=60, hidden_size=32, num_hidden_layers=2, norm="layernorm")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    controller = ns.remove_one_by_one_(model.train(), CONFIG, steps=40)
    assert not controller.uses.attention
    assert len(controller.uses.inseparable) == 2
    assert all("no bias that could take up the norm's shift" in why for why in controller.reasons.values())
    train(model, controller, 12, sgd(model))
    assert all(float(n.fake) == 1 for n in controller.sites.values())


def test_what_went_wrong_is_named() -> None:
    model = model_of()
    controller = ns.remove_one_by_one_(model, CONFIG, steps=40)
    controller.step()
    controller.step()
    with pytest.raises(InputError, match="no usable statistics by step 3"):
        controller.step()
    model = model_of()
    controller = ns.remove_one_by_one_(model, CONFIG, steps=40)
    model(input_ids=IDS)  # forward passes alone: an optimiser would spread it to every weight
    controller.step()
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.bias[0] = torch.inf
    model(input_ids=IDS)
    controller.step()
    model(input_ids=IDS)
    with pytest.raises(
        DivergedError, match=r"the input of transformer.h.1.ln_2 was the first that is not finite, at step 2 "
    ):
        controller.step()


@pytest.mark.slow
def test_two_ranks_freeze_the_mean_of_both(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.schedules.ddp_one_by_one"]
    root, environment = Path(__file__).parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(r), tmp_path / "store", tmp_path / f"{r}"], cwd=root, env=environment)
        for r in range(2)
    ]
    assert [rank.wait(timeout=180) for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}").read_text()) for rank in range(2))
    assert first["found"] == second["found"]
    assert first["weights"] == second["weights"]
    turns = {r.name: r.step for r in CONFIG.plan(LAST, uses_of(first["found"])) if r.what in ("whole", "v")}
    for name, (sigma, _) in first["found"].items():
        average = 0.0
        for a, b in list(zip(first["seen"][name], second["seen"][name], strict=True))[: turns[name]]:
            average += CONFIG.momentum * ((a + b) / 2 - average)
        assert sigma == pytest.approx(average / (1 - (1 - CONFIG.momentum) ** turns[name]), rel=1e-5)
        assert first["seen"][name] != second["seen"][name]


def uses_of(names: Any) -> Uses:
    mlp, attention = ([n for n in names if n.endswith(end)] for end in ("ln_2", "ln_1"))
    return Uses(tuple(mlp), tuple(attention), (), tuple(n for n in names if n.endswith("ln_f")))


def test_a_folder_from_the_middle_says_so_and_one_from_the_end_loads(tmp_path: Path) -> None:
    model = model_of()
    controller = ns.remove_one_by_one_(model, CONFIG, steps=40)
    train(model, controller, 8, sgd(model))
    model.save_pretrained(tmp_path / "middle")
    middle = AutoModelForCausalLM.from_pretrained(tmp_path / "middle", trust_remote_code=True)
    with pytest.raises(RuntimeError, match="saved while its norms were being removed"):
        middle(input_ids=IDS)
    train(model, controller, LAST - 8, sgd(model))
    model.eval().save_pretrained(tmp_path / "end")
    end = AutoModelForCausalLM.from_pretrained(tmp_path / "end", trust_remote_code=True)
    with torch.no_grad():
        assert apart(end(input_ids=IDS).logits, model(input_ids=IDS).logits) < 1e-6
    report = export_model(model, tmp_path / "stock", "stock")
    assert report.startswith("written as GPT2LMHeadModel with linear norms")
