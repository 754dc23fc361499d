"""Models of the user's own: found, tapered in a plain loop and folded, compiled or not, copied and stored."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.schedules import TaperConfig
from normsmith.surgery import find_norms, fold_, taper_

IDS = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """Three pre-norm residual layers, a final norm, a head; plain PyTorch."""

    def __init__(self, kind: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.norms = nn.ModuleList([kind(16) for _ in range(3)])  # pyright: ignore[reportCallIssue]
        self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.final, self.head = kind(16), nn.Linear(16, 40)  # pyright: ignore[reportCallIssue]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + torch.tanh(linear(norm(x)))
        return self.head(self.final(x))


def train(model: Any, controller: Any, steps: int, parameters: Any) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()) + controller.auxiliary_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        controller.step()


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("compiled", [False, True])
def test_taper_and_fold_a_model_of_ones_own(kind: type[nn.Module], compiled: bool) -> None:
    torch.compiler.reset()
    model = Own(kind)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    assert [site.role for site in find_norms(run, IDS)] == ["pre", "pre", "pre", "final"]
    controller = taper_(model, TaperConfig(warmup=0.2), steps=10, example=IDS)
    train(run, controller, 10, model.parameters())
    before = model.eval()(IDS)
    report = fold_(run, example=IDS)
    assert len(report.removed) == 3
    torch.testing.assert_close(model(IDS), before, rtol=1e-4, atol=1e-5)
    assert isinstance(model.final, kind)
    assert not model.final._forward_pre_hooks, "the folded model no longer holds the controller"


def test_tapering_again_replaces_the_first_controller() -> None:
    model = Own()
    taper_(model, {"warmup": 0.1}, steps=20, example=IDS)
    taper_(model, steps=20, example=IDS)
    assert len(model.final._forward_pre_hooks) == 1
    with pytest.raises(InputError, match="takes a TaperConfig"):
        taper_(model, 20, example=IDS)  # pyright: ignore[reportArgumentType]


def test_model_and_controller_can_be_copied_and_stored_in_the_middle_of_a_step() -> None:
    model = Own()
    controller = taper_(model, steps=20, example=IDS)
    model(IDS).sum().backward()
    for again, twin in (copy.deepcopy((model, controller)), pickle.loads(pickle.dumps((model, controller)))):
        assert torch.equal(again.eval()(IDS), model.eval()(IDS))
        assert twin.sites["norms.0"] is again.norms[0]
        model.train()


def test_a_model_without_known_norms_says_which_kinds_are_known() -> None:
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40))
    assert "nn.LayerNorm, nn.RMSNorm" in str(find_norms(model, IDS))
    with pytest.raises(InputError, match="nn.LayerNorm, nn.RMSNorm"):
        fold_(model, example=IDS)
    with pytest.raises(InputError, match="an input for one forward pass"):
        find_norms(model)
