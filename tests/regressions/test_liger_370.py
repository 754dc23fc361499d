"""Liger 370 and PR 376, nano-vllm 170: a norm in float32 overwrote the residual or the upstream gradient.

Kind of fault: aliasing. `x.float()` is x itself in float32, and in-place code then writes into somebody else's tensor.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normsmith.norms import create_norm, norms
from normsmith.surgery import swap_norms_
from tests.conftest import scramble
from tests.tiny import VARIED, example, is_norm, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", list(norms))
def test_neither_input_nor_upstream_gradient_is_written(kind: str, training: bool, dtype: torch.dtype) -> None:
    norm = scramble(create_norm(kind, 8)).to(dtype).train(training)
    x, upstream = torch.randn(2, 3, 8).to(dtype).requires_grad_(), torch.randn(2, 3, 8).to(dtype)
    kept = x.detach().clone(), upstream.clone()
    y = norm(x)
    output = y.detach().clone()
    y.backward(upstream)
    assert torch.equal(x, kept[0])
    assert torch.equal(upstream, kept[1])
    assert torch.equal(y, output)


class Sandwich(nn.Module):
    """Reads the output of its first norm twice, in the sublayer and as the stream, and norms the sublayer's output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = create_norm(kind, 6), create_norm(kind, 6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.second(self.linear(y).tanh()) * y


# AdaNorm's gradient is by definition another one: a factor counts as constant.
@pytest.mark.parametrize("kind", [kind for kind in norms if kind != "adanorm"])
def test_gradients_where_the_output_is_read_twice(kind: str) -> None:
    block = scramble(Sandwich(kind)).double().eval()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,))


@pytest.mark.parametrize("kind", list(norms))
@pytest.mark.parametrize("family", VARIED)
def test_no_norm_in_a_whole_model_writes_into_others(family: str, kind: str) -> None:
    model = tiny(family)
    swap_norms_(model, kind, init="fresh")
    seen: list[tuple[Tensor, Tensor]] = []

    def remember(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.extend((t, t.detach().clone()) for t in (args[0], output))

    for module in model.modules():
        if is_norm(module) or type(module).__module__.startswith("normsmith"):
            module.register_forward_hook(remember)
    model(**example(model))[0].square().sum().backward()
    assert len(seen) >= 10
    assert all(torch.equal(tensor, copy) for tensor, copy in seen)
