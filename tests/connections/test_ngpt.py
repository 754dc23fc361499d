"""What nGPT puts elsewhere than in the connection: unit weights, unit queries and keys, scales; and its training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from normsmith.connections.ngpt import QueryKeyScale, Scale, unit
from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM, preset_config
from normsmith.models.blocks import rotate
from normsmith.surgery import taper_
from normsmith.training import NormsmithCallback, Trainer, decayed_names, parameter_groups
from tests.training.runs import arguments, small, windows

D, VOCAB = 24, 50
IDS = torch.randint(VOCAB, (3, 11), generator=torch.Generator().manual_seed(1))


def ngpt(preset: str = "llama", **changes: Any) -> NormsmithForCausalLM:
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2}
    return NormsmithForCausalLM(preset_config(preset, **{**sizes, "connection": "ngpt", **changes}))


def move_scales(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.ndim != 2):
            parameter.add_(0.2 * torch.rand_like(parameter))


def lengths(model: nn.Module) -> dict[str, Tensor]:
    """The lengths of all vectors that live in the stream's space."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            axis = 0 if name.endswith(("o_proj", "down_proj")) else 1
            assert module.weight.shape[axis] in (D, 32), name
            found[name] = module.weight.detach().double().norm(dim=axis)
    return found


def is_unit(model: nn.Module) -> bool:
    return all((length - 1).abs().max() < 1e-6 for length in lengths(model).values())


def literal(model: Any, ids: Tensor) -> Tensor:
    """The whole model written out in float64, without a loop over anything but blocks."""
    heads, wide = model.config.num_attention_heads, D // model.config.num_attention_heads

    def norm(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    def split(x: Tensor) -> Tensor:
        return x.view(*ids.shape, -1, wide).transpose(1, 2)

    h = norm(model.model.embed_tokens.weight[ids])
    rotation = model.model.rotary(torch.arange(ids.shape[1])[None], torch.float64)
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        s_qk = attention.scale.scale.gamma.view(heads, 1, wide) * math.sqrt(D)
        q, k, v = (split(h @ p.weight.T) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = s_qk * norm(rotate(q, rotation)), s_qk * norm(rotate(k, rotation))
        scores = (q @ k.transpose(-1, -2) * math.sqrt(wide)).masked_fill(torch.ones(11, 11).triu(1).bool(), -math.inf)
        a = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ attention.o_proj.weight.T
        h = norm(h + 0.05 * math.sqrt(D) * block.attention_connection.alpha * (norm(a) - h))
        u = h @ mlp.up_proj.weight.T * mlp.up_scale.gamma
        gate = h @ mlp.gate_proj.weight.T * mlp.gate_scale.gamma * math.sqrt(D)
        m = (u * F.silu(gate)) @ mlp.down_proj.weight.T
        h = norm(h + 0.05 * math.sqrt(D) * block.mlp_connection.alpha * (norm(m) - h))
    return h @ model.lm_head.weight.T * model.logit_scale.gamma * math.sqrt(D)


def test_the_whole_model_is_the_formula() -> None:
    model = ngpt().double().eval()
    move_scales(model)
    torch.testing.assert_close(model(IDS).logits, literal(model, IDS), rtol=1e-6, atol=1e-6)  # rotary angles: float32


def test_at_the_start_every_scale_has_its_published_value() -> None:
    model = ngpt()
    block = model.model.layers[0]
    torch.testing.assert_close(block.attention_connection.step_size(), torch.full((D,), 0.05))
    ones = {"logit_scale": (model.logit_scale, VOCAB), "up": (block.mlp.up_scale, 64)}
    for name, (scale, width) in ones.items():
        assert scale(torch.ones(width)).tolist() == pytest.approx([1.0] * width), name
    assert block.mlp.gate_scale(torch.ones(64)).tolist() == pytest.approx([D**0.5] * 64)
    assert (block.mlp.gate_scale.gamma == 1).all()
    for stored in (block.attention_connection.alpha, block.self_attn.scale.scale.gamma, model.logit_scale.gamma):
        assert stored.flatten().tolist() == pytest.approx([D**-0.5] * stored.numel())
    assert block.self_attn.scaling == pytest.approx((D // 2) ** 0.5)
    assert ngpt("gpt").model.layers[0].mlp.up_scale.factor == pytest.approx(D**0.5)


def test_queries_and_keys_of_grouped_heads() -> None:
    scale = QueryKeyScale(heads=2, head_width=6).double()
    move_scales(scale)
    q, k = torch.randn(3, 6, 5, 6, dtype=torch.float64), torch.randn(3, 2, 5, 6, dtype=torch.float64)
    for got, wanted in zip(scale(q, k), scale.reference(q, k), strict=True):
        torch.testing.assert_close(got, wanted)
    again = scale(5 * q, 0.1 * k)
    torch.testing.assert_close(again[0], scale(q, k)[0])
    assert not torch.allclose(scale(q, k)[0][:, 0], unit(q)[:, 0])


@pytest.mark.parametrize("preset", ["llama", "gpt"])
def test_weights_have_unit_length_at_the_start_and_after_every_step(preset: str) -> None:
    model = ngpt(preset, num_key_value_heads=1)
    assert is_unit(model)
    assert len(lengths(model)) == (16 if preset == "llama" else 15)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-2)
    assert decayed_names(model) == []
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not is_unit(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.normalize_weights_()
    assert is_unit(model)
    for name, parameter in model.named_parameters():
        if not name.endswith("_proj.weight") and "embed" not in name and "lm_head" not in name:
            assert torch.equal(parameter, before[name]), name
        elif "_proj.weight" in name:  # turned nowhere
            axis = 0 if "o_proj" in name or "down_proj" in name else 1
            assert F.cosine_similarity(parameter, before[name], dim=axis).min() > 1 - 1e-6


def test_other_families_are_left_alone() -> None:
    model = ngpt(connection="pre")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.normalize_weights_()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_weights_that_a_folder_lacks_start_with_unit_length_and_the_others_are_loaded(tmp_path: Path) -> None:
    model = ngpt("gpt")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(3)  # not of unit length: loading must not touch it
    lost = ("layers.1", "logit_scale", "layers.0.mlp.down_proj.bias")
    kept = {k: v for k, v in model.state_dict().items() if not any(part in k for part in lost)}
    model.save_pretrained(tmp_path, state_dict=kept)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in kept.items())
    found = lengths(again)
    assert all((found[name] - 1).abs().max() < 1e-6 for name in found if "layers.1" in name)
    assert again.logit_scale.gamma.tolist() == pytest.approx([D**-0.5] * VOCAB)
    assert again.model.layers[1].self_attn.scale.scale.gamma.flatten().tolist() == pytest.approx([D**-0.5] * D)


@pytest.mark.parametrize("stock", [False, True])
def test_the_trainer_normalises_after_every_step(stock: bool, tmp_path: Path) -> None:
    model = small(connection="ngpt", hidden_size=32)
    seen: list[bool] = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(is_unit(model))

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(is_unit(model))

    options: Any = {"args": arguments(tmp_path, weight_decay=0.1), "train_dataset": windows()}
    if stock:
        callbacks: list[Any] = [NormsmithCallback(), Watch()]
        trainer: Any = transformers.Trainer(model, callbacks=callbacks, **options)
    else:
        trainer = Trainer(model, callbacks=[Watch()], **options)
    trainer.train()
    assert len(seen) == 16
    assert all(seen[::2])
    assert not any(seen[3::2])  # the learning rate of the first step is 0
    assert is_unit(model)
    assert any(isinstance(c, NormsmithCallback) for c in trainer.callback_handler.callbacks)
    plain = Trainer(small(connection="pre"), **options)
    assert not any(isinstance(c, NormsmithCallback) for c in plain.callback_handler.callbacks)


def test_zero_outputs_and_scales_stay_finite() -> None:
    model = ngpt()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.gate_scale.gamma.zero_()
        model.model.embed_tokens.weight[3] = 0
    loss = model(torch.full((1, 8), 3), labels=torch.full((1, 8), 3)).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_scale_that_is_stored_smaller_learns_faster() -> None:
    x = torch.ones(4)
    moved: list[float] = []
    for stored in (1.0, 0.1):
        scale = Scale((4,), 2.0, stored)
        optimizer = torch.optim.Adam(scale.parameters(), lr=1e-2)
        scale(x).sum().backward()
        optimizer.step()
        moved.append(2.0 - float(scale(x)[0].detach()))
    assert moved[1] == pytest.approx(10 * moved[0], rel=1e-3)


def test_a_schedule_cannot_continue_a_checkpoint_whose_callback_had_none(tmp_path: Path) -> None:
    stored = {"NormsmithCallback": NormsmithCallback().state()}
    state = transformers.TrainerState(global_step=3, max_steps=8, stateful_callbacks=stored)
    callback = NormsmithCallback(taper_(small(), steps=8))
    with pytest.raises(InputError, match="the checkpoint of step 3 holds no schedule"):
        callback.on_train_begin(arguments(tmp_path), state, transformers.TrainerControl())
