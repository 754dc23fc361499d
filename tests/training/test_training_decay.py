"""Weight decay follows the role of a parameter, not its name or class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from normsmith.connections import connections
from normsmith.models import NormsmithForCausalLM, NormsmithForTableRegression, NormsmithTableConfig
from normsmith.norms import Norm, NormConfig, norms
from normsmith.training import Trainer, decayed_names, parameter_groups
from tests.training.runs import arguments, small, windows


def matrices(model: NormsmithForCausalLM) -> set[str]:
    """The linear and embedding matrices of the reference model, written out."""
    mlp = ("gate_proj", "up_proj", "down_proj") if model.config.mlp == "swiglu" else ("up_proj", "down_proj")
    leaves = [*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}" for p in mlp)]
    blocks = {f"model.layers.{i}.{leaf}.weight" for i in range(2) for leaf in leaves}
    embeddings = {"model.embed_tokens.weight"}
    return blocks | embeddings | ({"model.embed_positions.weight"} if model.config.positions == "learned" else set())


@pytest.mark.parametrize("preset", ["llama", "gpt"])
@pytest.mark.parametrize("norm", list(norms))
def test_only_matrices_are_decayed_with_every_norm(norm: str, preset: str) -> None:
    model = small(preset, norm=norm, final_norm=norm)
    assert set(decayed_names(model)) == matrices(model)


@pytest.mark.parametrize("connection", [*connections, *connections.aliases])
def test_only_matrices_are_decayed_with_every_connection(connection: str) -> None:
    model = small("gpt", connection=connection)
    names = decayed_names(model)
    if connections.get(connection).unit_weights:  # decay would only change the length that every step restores
        assert names == []
        return
    assert len(names) == len(set(names))
    assert set(names) == matrices(model)


class Selector(Norm):
    """A norm that owns matrices, as adaptive norms do."""

    def __init__(self, width: int) -> None:
        super().__init__(width, NormConfig(kind="selector"))
        self.choice = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.choice(x).softmax(-1)[..., :1]


def test_matrices_inside_a_norm_are_not_decayed() -> None:
    model = small()
    model.model.norm = Selector(32)
    assert "model.norm.choice.weight" in dict(model.named_parameters())
    assert set(decayed_names(model)) == matrices(model)


def test_biases_of_features_are_not_decayed() -> None:
    model = NormsmithForTableRegression(NormsmithTableConfig(hidden_size=32, num_hidden_layers=1))
    names = set(decayed_names(model))
    assert "tokens.weights" in names
    assert not any("bias" in name for name in names)


def test_untied_head_is_decayed() -> None:
    model = small(tie_word_embeddings=False)
    assert set(decayed_names(model)) == matrices(model) | {"lm_head.weight"}


def test_groups_hold_every_trainable_parameter_once() -> None:
    model = small("gpt", connection="sphere")
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.bias.requires_grad_(False)
    decayed, kept = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    grouped = [*decayed["params"], *kept["params"]]  # pyright: ignore[reportGeneralTypeIssues]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(grouped) == len({id(p) for p in grouped})
    assert sum(p.numel() for p in grouped) == model.num_parameters(only_trainable=True)
    torch.optim.AdamW([decayed, kept], lr=1e-3)


def gpt2_with_dyt() -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    for block in model.transformer.h:
        block.ln_1 = norms.get("dyt").from_site(block.ln_1, 32)
    return model


def test_stock_decays_the_alpha_of_a_swapped_norm_and_ours_does_not(tmp_path: Path) -> None:
    # CASES row 15 (composer 43, fasterai PR 92, transformers PR 35927)
    stock = transformers.Trainer(gpt2_with_dyt(), arguments(tmp_path), train_dataset=windows())
    assert "transformer.h.0.ln_1.alpha" in stock.get_decay_parameter_names(stock.model)
    model = gpt2_with_dyt()
    trainer = Trainer(model, arguments(tmp_path, weight_decay=0.2), train_dataset=windows())
    optimizer = trainer.create_optimizer()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in optimizer.param_groups}
    blocks = {
        f"transformer.h.{i}.{leaf}.weight"
        for i in range(2)
        for leaf in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert groups[0.2] == blocks | {"transformer.wte.weight", "transformer.wpe.weight"}
    assert groups[0.0] == set(names.values()) - groups[0.2]
    assert {"transformer.h.0.ln_1.alpha", "transformer.h.1.ln_1.gamma", "transformer.h.1.ln_1.beta"} <= groups[0.0]


def test_a_step_without_gradient_shrinks_matrices_alone(tmp_path: Path) -> None:
    model = small("gpt", connection="sphere")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, arguments(tmp_path, weight_decay=0.5, learning_rate=0.1), train_dataset=windows())
    optimizer = trainer.create_optimizer()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in matrices(model) else 1
        torch.testing.assert_close(p.detach(), before[name] * factor, rtol=1e-6, atol=0)
