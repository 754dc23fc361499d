"""Lightning 20803, 21755, 20804; auto-round 1308: a converter crashed on `bias=None`, skipped RMSNorm, lost hooks.

Kind of fault: optional parts and the context of a module are not carried over. None stays None; hooks, device, dtype,
mode and `requires_grad` are kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn

from normsmith.norms import norms
from normsmith.surgery import restore_, swap_norms_

NORMS = {
    "layernorm": lambda **k: nn.LayerNorm(8, **k),
    "layernorm without bias": lambda **k: nn.LayerNorm(8, bias=False, **k),
    "layernorm without parameters": lambda **k: nn.LayerNorm(8, elementwise_affine=False, **k),
    "rmsnorm": lambda **k: nn.RMSNorm(8, eps=1e-5, **k),
    "rmsnorm without parameters": lambda **k: nn.RMSNorm(8, eps=1e-5, elementwise_affine=False, **k),
}


class Block(nn.Module):
    def __init__(self, norm: nn.Module, **options: Any) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(8, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NORMS)
def test_everything_of_the_old_norm_is_kept(
    name: str, dtype: torch.dtype, device: str, training: bool, frozen: bool
) -> None:
    model = Block(NORMS[name](dtype=dtype, device=device), dtype=dtype, device=device)
    old = model.norm.train(training)
    for parameter in old.parameters():
        parameter.requires_grad_(not frozen)
        if device == "cpu":
            nn.init.normal_(parameter)
    calls: list[str] = []
    handles = [old.register_forward_hook(lambda *a: calls.append("after")),
               old.register_forward_pre_hook(lambda *a: calls.append("before"))]  # fmt: skip
    x = torch.randn(2, 3, 8, dtype=dtype, device=device)
    before = model(x)
    swap_norms_(model, name.partition(" ")[0], example=x)
    new: Any = model.norm
    assert new.training == training
    assert (new.gamma is None) == (old.weight is None)
    assert new.gamma is old.weight
    assert getattr(new, "beta", None) is getattr(old, "bias", None)
    assert all(p.device.type == device and p.dtype == dtype for p in new.parameters())
    assert all(p.requires_grad != frozen for p in new.parameters())
    calls.clear()
    after = model(x)
    assert calls == ["before", "after"]
    assert after.dtype == dtype
    if device == "cpu":
        torch.testing.assert_close(after, before, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    for handle in handles:
        handle.remove()
    calls.clear()
    model(x)
    assert calls == [], "a handle from before the swap still removes its hook"
    restore_(model)
    assert model.norm is old


@pytest.mark.parametrize("kind", list(norms))
@pytest.mark.parametrize("init", ["match", "fresh"])
@pytest.mark.parametrize("name", NORMS)
def test_every_norm_takes_the_place_of_every_other(name: str, init: Any, kind: str) -> None:
    model = Block(NORMS[name]().requires_grad_(False)).eval()
    calls: list[int] = []
    model.norm.register_full_backward_hook(lambda *a: calls.append(1))
    swap_norms_(model, kind, init=init, example=torch.randn(2, 3, 8))
    new = model.norm
    assert type(new) is norms.get(kind)
    assert not new.training
    if "without parameters" not in name:
        assert not any(p.requires_grad for p in new.parameters())
    model(torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    assert calls == [1]


class Doubles(ModelHook):
    """Stands for accelerate's hooks that move inputs and weights."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tuple(2 * a for a in args), kwargs


@pytest.mark.parametrize("kind", ["layernorm", "dyt"])
def test_accelerate_hooks_go_along(kind: str) -> None:
    model = Block(nn.LayerNorm(8))
    hook = Doubles()
    add_hook_to_module(model.norm, hook)
    swap_norms_(model, kind, example=torch.randn(2, 3, 8))
    new: Any = model.norm
    assert new._hf_hook is hook
    x = torch.randn(2, 3, 8)
    assert torch.equal(new(x), type(new).forward(new, 2 * x))
