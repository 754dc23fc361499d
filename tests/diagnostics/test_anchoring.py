"""The theory of scale anchoring on real models: zero radial product with a final norm, negative without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import normsmith as ns
from normsmith.diagnostics import anchoring
from normsmith.diagnostics.roles import weight_parts
from normsmith.errors import InputError
from normsmith.training import AnchoringCallback, Trainer
from tests.tiny import tiny
from tests.training.runs import arguments, logged, windows
from tests.training.runs import small as trainable

IDS = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(1))
FAMILIES = ("gpt2", "gpt_neox", "opt", "bloom", "llama", "qwen3")


def own(**changes: Any) -> Any:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    return ns.NormsmithForCausalLM(ns.preset_config("llama", **{**sizes, **changes})).double()


def per_token(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_j p_j·z_j − z_y, the margin of the correct logit, and p_y, from the logits alone."""
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits[:, :-1].double()
    p, target = logits.softmax(-1), IDS[:, 1:, None]
    correct = logits.gather(-1, target)
    margin = correct - logits.scatter(-1, target, -torch.inf).amax(-1, keepdim=True)
    return (p * logits).sum(-1) - correct[..., 0], margin[..., 0], p.gather(-1, target)[..., 0]


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny("gpt2", layer_norm_epsilon=1e-30).double(),
        lambda: own(norm={"kind": "rmsnorm", "eps": 1e-30}),
        lambda: own(norm={"kind": "layernorm", "eps": 1e-30}),
    ],
)
def test_with_a_final_norm_the_radial_product_is_zero_to_rounding(model: Any) -> None:
    model = model()
    found = anchoring(model, [IDS])
    products, _, _ = per_token(model)
    assert abs(float(products.mean())) > 0.05, "what it would be without the norm"
    assert abs(found.radial) < 1e-13


def test_without_a_final_norm_it_is_negative_as_the_margin_says() -> None:
    model = own(final_norm="identity")
    found = anchoring(model, [IDS])
    assert found.radial == pytest.approx(float(per_token(model)[0].mean()), rel=1e-9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = anchoring(model, [IDS])
    products, margin, p = per_token(model)
    assert bool((margin > 0).all())
    bound = -float(((1 - p) * margin).mean())
    assert found.radial == pytest.approx(float(products.mean()), rel=1e-9)
    assert found.radial <= bound < 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_numbers_are_those_of_a_literal_computation(family: str) -> None:
    model = tiny(family)
    seen: list[Tensor] = []
    final = model.transformer.ln_f if family == "gpt2" else model.model.norm
    handle = final.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach().double()))
    halves = IDS[:, :7], IDS[:, 3:]
    twin = copy.deepcopy(model)
    found = anchoring(model, halves)
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    logits = [twin(input_ids=half).logits for half in halves]
    losses = [
        F.cross_entropy(z[:, :-1].flatten(0, 1), half[:, 1:].flatten(), reduction="none")
        for z, half in zip(logits, halves, strict=True)
    ]
    loss = torch.cat(losses).mean()
    loss.backward()
    h = torch.cat([x.flatten(0, 1) for x in seen[-2:]])
    s = (h - h.mean(-1, keepdim=True) if family == "gpt2" else h).square().mean(-1).sqrt()
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert found.logit_norm == pytest.approx(
        torch.cat([z.norm(dim=-1).flatten() for z in logits]).mean().item(), rel=1e-5
    )
    assert found.scale_mean == pytest.approx(float(s.mean()), rel=1e-6)
    assert found.scale_std == pytest.approx(float(s.std(correction=0)), rel=1e-5)
    expected: dict[str, list[float]] = {}
    for name, parameter in twin.named_parameters():
        for role, part in named(family, name, parameter.grad).items():
            expected.setdefault(role, []).append(float(part.norm()))
    assert set(found.gradients) == set(expected)
    for role, values in expected.items():
        assert found.gradients[role] == pytest.approx(sum(values) / len(values), rel=1e-5), role


def named(family: str, name: str, gradient: Any) -> dict[str, Tensor]:
    """The parts of a gradient by role, from the names that these two families give."""
    if not name.endswith("weight") or gradient.ndim < 2:
        return {}
    if family == "gpt2" and name.endswith("c_attn.weight"):
        return dict(zip("qkv", gradient.chunk(3, dim=1), strict=True))
    words = {
        **{"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "attn.c_proj": "o", "lm_head": "head"},
        **{"c_fc": "mlp_in", "gate_proj": "mlp_in", "up_proj": "mlp_in", "mlp.c_proj": "mlp_out"},
        **{"down_proj": "mlp_out", "wte": "embedding", "wpe": "embedding", "embed_tokens": "embedding"},
    }
    return {role: gradient for word, role in words.items() if f"{word}.weight" in name}


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_are_found_in_every_block(family: str) -> None:
    model = tiny(family)
    parts = weight_parts(model)
    by_role: dict[str, list[str]] = {}
    for part in parts:
        by_role.setdefault(part.role, []).append(part.parameter)
    inner = {"q": 2, "k": 2, "v": 2, "o": 2, "mlp_out": 2, "mlp_in": 4 if family in ("llama", "qwen3") else 2}
    assert {role: len(names) for role, names in by_role.items() if role in inner} == inner
    ends = {"dense", "c_proj", "out_proj", "o_proj"}
    assert all(name.split(".")[-2] in ends for name in by_role["o"])
    last = {"c_proj", "dense_4h_to_h", "fc2", "down_proj"}
    assert all(name.split(".")[-2] in last for name in by_role["mlp_out"])
    assert ("head" in by_role) == (model.get_output_embeddings().weight is not model.get_input_embeddings().weight)


def test_padding_does_not_count() -> None:
    model = tiny("llama").double()
    short = IDS[:1, :8]
    padded = torch.cat((short, torch.full((1, 4), 5)), dim=1)
    mask = torch.cat((torch.ones(1, 8), torch.zeros(1, 4)), dim=1).long()
    plain = anchoring(model, [short]).to_dict()
    masked = anchoring(model, [{"input_ids": padded, "attention_mask": mask}]).to_dict()
    for name in ("loss", "logit_norm", "scale_mean", "scale_std"):
        assert masked[name] == pytest.approx(plain[name], rel=1e-6), name
    assert masked["gradients"] == pytest.approx(plain["gradients"], rel=1e-5)


def test_a_folded_model_is_measured_at_its_head() -> None:
    model = own()
    controller = ns.taper_(model, ns.TaperConfig(placement="all", scale_loss=0), steps=10)
    controller.close()
    for norm in controller.sites.values():
        norm.gate.zero_()
        norm.gate_eval.zero_()
        norm.scale.fill_(0.7)
    before = anchoring(model, [IDS])
    ns.fold_(model)
    after = anchoring(model, [IDS])
    for name in ("loss", "logit_norm", "scale_mean", "scale_std", "radial"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-6), name
    assert after.radial != 0
    assert set(after.gradients) >= {"q", "k", "v", "o", "mlp_in", "mlp_out"}
    with pytest.raises(InputError, match="at least one batch"):
        anchoring(model, [])


def test_an_evaluation_logs_the_scales_where_it_is_asked_for(tmp_path: Path) -> None:
    data = windows(8, seed=None)
    for callbacks in ([AnchoringCallback()], []):
        model = trainable()
        args = arguments(tmp_path, max_steps=4)
        args.eval_strategy, args.eval_steps = "steps", 4
        args.report_to, args.label_names = [], ["labels"]
        trainer = Trainer(model, args, train_dataset=windows(), eval_dataset=data, callbacks=callbacks)
        trainer.train()
        found = logged(trainer, "logit_norm")
        assert bool(found) == bool(callbacks)
        if callbacks:
            direct = anchoring(model, [torch.stack([torch.as_tensor(data[i]["input_ids"]) for i in range(8)])])
            assert found == {4: pytest.approx(direct.logit_norm, rel=1e-5)}
            assert logged(trainer, "stream_scale_mean") == {4: pytest.approx(direct.scale_mean, rel=1e-5)}
            assert logged(trainer, "stream_scale_std") == {4: pytest.approx(direct.scale_std, rel=1e-4)}
