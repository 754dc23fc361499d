"""composer 43, fasterai PR 92; transformers PR 35927: after surgery the optimiser trained tensors that no model has.

Kind of fault: stale references, and weight decay by name or class. An optimiser from before the swap is refused by the
callback and can be moved to the new parameters; what a norm owns is never decayed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import normsmith as ns
from normsmith.errors import InputError
from normsmith.norms import norms
from normsmith.surgery import restore_, swap_norms_, taper_
from normsmith.training import NormsmithCallback, Trainer, decayed_names, parameter_groups, rebind_optimizer_
from tests.tiny import VARIED, example, is_norm, tiny


def held(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    return {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    ids = example(model)["input_ids"]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", list(norms))
@pytest.mark.parametrize("family", ["gpt2", "gemma", "qwen3"])
def test_an_old_optimizer_is_moved_to_the_new_parameters(family: str, kind: str) -> None:
    model = tiny(family)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.3), lr=1e-2)
    train_step(model, optimizer)
    swap_norms_(model, kind)
    state = {id(p): optimizer.state[p]["exp_avg"].clone() for p in model.parameters() if p in optimizer.state}
    report = rebind_optimizer_(optimizer, model)
    assert set(held(optimizer)) == {id(p) for p in model.parameters()}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    decayed = set(decayed_names(model))
    assert all(held(optimizer)[id(p)] == (0.3 if n in decayed else 0.0) for n, p in model.named_parameters())
    assert set(optimizer.state) <= set(model.parameters()), "no state of tensors that are gone"
    assert all(torch.equal(optimizer.state[p]["exp_avg"], state[id(p)]) for p in model.parameters() if id(p) in state)
    assert str(rebind_optimizer_(optimizer, model)).startswith("nothing to rebind")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_step(model, optimizer)
    still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    # β of a norm under a softmax, and a γ̃ that does not act yet, have no gradient to follow.
    assert all(n.endswith(("gamma_tilde", "embeddings")) for n in still), still
    assert not report.decayed


def test_the_report_names_what_was_dropped_and_added() -> None:
    model = tiny("gemma")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    swap_norms_(model, "dyt", where="final")
    report = rebind_optimizer_(optimizer, model)
    assert report.dropped == 1
    assert report.undecayed == ("model.norm.alpha", "model.norm.gamma", "model.norm.beta")
    assert "dropped 1 parameter(s)" in str(report)
    assert "added without weight decay: model.norm.alpha" in str(report)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[1]["lr"] == 1e-3


def test_matrices_that_are_new_are_decayed_and_frozen_ones_left_out() -> None:
    model = tiny("llama")
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    model.lm_head = torch.nn.Linear(32, 60)
    model.lm_head.bias.requires_grad_(False)
    report = rebind_optimizer_(optimizer, model)
    assert report.decayed == ("lm_head.weight",)
    assert report.undecayed == ()
    assert held(optimizer)[id(model.lm_head.weight)] == 0.1


def test_restoring_and_rebinding_gives_back_the_first_parameters() -> None:
    model = tiny("gemma")
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-3)
    before = held(optimizer)
    swap_norms_(model, "layernorm")
    rebind_optimizer_(optimizer, model)
    restore_(model)
    rebind_optimizer_(optimizer, model)
    assert held(optimizer) == before


@pytest.mark.parametrize("groups", [1, 2])
def test_an_optimizer_with_names_keeps_them(groups: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    named = list(model.named_parameters())
    plain = [{"params": named[2:], "weight_decay": 0.0}] if groups == 2 else []
    optimizer = torch.optim.AdamW([{"params": named[: 2 if plain else None], "weight_decay": 0.1}, *plain])
    model[1] = nn.LayerNorm(4)
    model.append(nn.Linear(4, 2))
    report = rebind_optimizer_(optimizer, model)
    assert (report.dropped, report.decayed) == (2, ("3.weight",))
    assert report.undecayed == ("1.weight", "1.bias", "3.bias")
    found = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    assert found == dict(model.named_parameters())
    assert len(optimizer.param_groups) == 2


def test_what_cannot_be_rebound() -> None:
    model, other = tiny("gemma"), tiny("gemma")
    with pytest.raises(InputError, match="holds no parameter of this model"):
        rebind_optimizer_(torch.optim.SGD(other.parameters(), lr=0.1), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    swap_norms_(model, "rmsnorm")
    before = held(optimizer)
    with pytest.raises(InputError, match="before the scheduler is made"):
        rebind_optimizer_(optimizer, model)
    assert held(optimizer) == before


def arguments(folder: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip


def data() -> Any:
    return [{"input_ids": row, "labels": row} for row in torch.randint(3, 60, (8, 10))]


@pytest.mark.parametrize("cls", [transformers.Trainer, Trainer])
def test_a_trainer_with_an_old_optimizer_is_stopped(cls: Any, tmp_path: Path) -> None:
    model = tiny("gemma")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    controller = taper_(model, ns.TaperConfig(warmup=0.4, scale_loss=0))
    options = {"controller": controller} if cls is Trainer else {"callbacks": [NormsmithCallback(controller)]}

    def trainer() -> Any:
        return cls(model, arguments(tmp_path), train_dataset=data(), optimizers=(optimizer, None), **options)

    with pytest.raises(InputError, match=r"does not train model\.layers\.0\.input_layernorm\.gamma.*rebind_optimizer_"):
        trainer().train()
    ns.rebind_optimizer_(optimizer, model)
    trainer().train()
    assert controller.completed == 3


def test_the_callback_accepts_an_optimizer_made_after_the_swap(tmp_path: Path) -> None:
    model = tiny("gpt2")
    swap_norms_(model, "dyt")
    transformers.Trainer(model, arguments(tmp_path), train_dataset=data(), callbacks=[NormsmithCallback()]).train()


@pytest.mark.parametrize("kind", list(norms))
@pytest.mark.parametrize("family", VARIED)
def test_what_a_norm_owns_is_never_decayed(family: str, kind: str) -> None:
    model = tiny(family)
    for changed in (False, True):
        if changed:
            swap_norms_(model, kind, init="fresh")
        owned = {id(p) for m in model.modules() for p in m.parameters()
                 if is_norm(m) or type(m).__module__.startswith("normsmith")}  # fmt: skip
        names = dict(model.named_parameters())
        assert not owned & {id(names[name]) for name in decayed_names(model)}
