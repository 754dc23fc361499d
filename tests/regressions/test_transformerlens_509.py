"""TransformerLens 509: the norms of BERT were folded into Q, K and V as if they were pre-norms.

Kind of fault: an architecture is assumed. A norm that also feeds the residual stream must be left, with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from normsmith.errors import InputError, NotFoldableError
from normsmith.norms import create_norm, norms
from normsmith.surgery import find_norms, fold_, swap_norms_
from tests.conftest import scramble
from tests.tiny import output, same_state, scramble_all, state, tiny


def post_norm_model() -> Any:
    return scramble_all(transformers.BertModel(tiny("bert").config).eval())


@pytest.mark.parametrize("mode", ["affine", "full"])
def test_no_norm_of_bert_is_folded(mode: Any) -> None:
    model = post_norm_model()
    before = state(model)
    with pytest.raises(InputError, match="nothing to fold") as error:
        fold_(model, mode)
    if mode == "affine":
        text = str(error.value)
        assert text.count("also feeds the residual stream") == 4
        assert text.count("the model returns it") == 1
        with pytest.raises(NotFoldableError, match=r"layer\.0\.output\.LayerNorm: also feeds the residual stream"):
            fold_(model, mode, strict=True)
    assert same_state(model, before)


@pytest.mark.parametrize("kind", list(norms))
def test_no_norm_of_bert_is_folded_after_a_swap(kind: str) -> None:
    model = post_norm_model()
    swap_norms_(model, kind)
    before, logits = state(model), output(model)
    assert not [s.name for s in find_norms(model) if not s.blocked]
    for mode in ("affine", "full"):
        with pytest.raises(InputError, match="nothing to fold|the taper is not complete"):
            fold_(model, mode)
    assert same_state(model, before)
    assert (output(model) == logits).all()


class Post(nn.Module):
    """x ← norm(x + sublayer(x)), twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([create_norm(kind, 8) for _ in range(2)])
        self.linears = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=False):
            x = norm(x + linear(x).tanh())
        return self.linears[2](x)


@pytest.mark.parametrize("kind", list(norms))
def test_only_the_last_norm_of_a_post_norm_model_is_foldable(kind: str) -> None:
    model = scramble(Post(kind))
    first, last = find_norms(model, torch.randn(2, 3, 8))
    assert (first.role, first.blocked) == ("post", "also feeds the residual stream")
    assert (last.role, last.blocked) == ("final", "")
