"""Liger 74, axolotl PR 1886: Gemma was trained wrongly, with a norm made for Llama.

Kind of fault: the convention (1 + w) is ignored when a norm is replaced. The effective scale must be kept, for every
norm class of transformers.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
import transformers.models
from torch import nn

from normsmith.surgery import find_norms, swap_norms_
from normsmith.surgery.probe import norm_facts
from tests.tiny import FAMILIES, apart, output, tiny

ZOO = ["llama", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "qwen3", "qwen3_next", "olmo", "olmo2", "cohere"]
ZOO += ["t5", "gpt2", "bloom", "mistral", "mixtral", "deepseek_v3", "glm4", "phi3", "nemotron", "recurrent_gemma"]


def norm_classes() -> list[type[nn.Module]]:
    """Classes with Norm in their name that are made from a width alone, or a width and eps."""
    names = {m.name for m in pkgutil.iter_modules(transformers.models.__path__)}
    found: dict[str, type[nn.Module]] = {}
    for family in ZOO:
        if family not in names:
            continue
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, nn.Module) and "Norm" in name:
                found[f"{value.__module__}.{name}"] = value
    return list(found.values())


class Reads(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def made(cls: Any, zero: bool) -> Any:
    try:
        norm = cls(24)
    except TypeError:
        return None
    with torch.no_grad():
        for parameter in norm.parameters():
            if zero:
                parameter.zero_()
            else:
                parameter.normal_()
    return norm


def plain_classes() -> list[type[nn.Module]]:
    return [c for c in norm_classes() if (n := made(c, False)) is not None and (f := norm_facts(n)) and f.plain]


@pytest.mark.parametrize("cls", plain_classes(), ids=lambda c: f"{c.__module__.rpartition('.')[2]}.{c.__name__}")
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_swap_keeps_the_effective_scale(cls: Any, zero: bool, size: float) -> None:
    norm = made(cls, zero)
    model, x = Reads(norm), size * (torch.randn(4, 7, 24) + 0.4)
    before, kind = norm(x), find_norms(model, x)[0].kind
    report = swap_norms_(model, kind, example=x)
    assert [name for name, *_ in report.swapped] == ["norm"]
    assert report.swapped[0][3] <= 1e-6
    torch.testing.assert_close(model.norm(x), before, rtol=1e-5, atol=2e-6)


def test_the_zoo_is_there() -> None:
    classes = plain_classes()
    assert len(classes) >= 20
    assert sum(norm_facts(made(cls, False)).offset == 1 for cls in classes) >= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_swap_keeps_the_function_of_the_model(family: str) -> None:
    model = tiny(family)
    before, kinds = output(model), {site.kind for site in find_norms(model)}
    assert len(kinds) == 1
    swap_norms_(model, kinds.pop())
    assert apart(output(model), before) <= 1e-5
