"""torch's fused encoder layers read their norms' weights themselves: surgery switches them off, and on again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from normsmith.errors import VerificationError
from normsmith.surgery import fold, fold_, restore_, swap_norms_, taper_
from tests.surgery.family import randomize

X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


def encoder(norm_first: bool = False) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 48, norm_first=norm_first, batch_first=True)
    randomize(model := nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first))
    return model.eval()


def switches(model: nn.TransformerEncoder) -> list[object]:
    layers = [layer.activation_relu_or_gelu for layer in model.layers]  # pyright: ignore
    return [model.use_nested_tensor, *layers, "_normsmith_fused" in vars(model)]


@torch.no_grad()
def run(model: nn.Module, fused: bool = True) -> Tensor:
    """Both forms give other values at padded places."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fused)
    try:
        return model(X, src_key_padding_mask=PADDING)[~PADDING]
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("where", ["layers.0.norm1", "layers.1.norm2", None])
def test_a_padded_batch_goes_through_the_new_norms(where: str | None) -> None:
    model = encoder()
    before = switches(model)
    plain = run(model)
    swap_norms_(model, "rmsnorm", where=where, example=X)
    swapped = run(model)
    assert (swapped - plain).abs().max() > 0.1, "the fused form would have computed LayerNorm still"
    torch.testing.assert_close(swapped, run(model, fused=False), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(copy.deepcopy(model)), swapped, rtol=0, atol=0)
    swap_norms_(model, "dyt", example=X)
    restore_(model)
    torch.testing.assert_close(run(model), swapped, rtol=0, atol=0)
    restore_(model)
    assert switches(model) == before
    torch.testing.assert_close(run(model), plain, rtol=0, atol=0)


def test_a_folded_layer_runs_and_a_failed_fold_leaves_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder(norm_first=True)
    taper_(model, {"scale_loss": 0.0}, steps=10, example=X).close()
    for name, buffer in model.named_buffers():
        if name.endswith(("gate", "gate_eval")):
            buffer.zero_()
    before = run(model)
    state = switches(model)
    absorb = fold.into_reader
    with monkeypatch.context() as patch:
        patch.setattr(fold, "into_reader", lambda *args: None)
        with pytest.raises(VerificationError):
            fold_(model, example=X)
    assert fold.into_reader is absorb
    assert switches(model) == state
    fold_(model, example=X)
    torch.testing.assert_close(run(model), before, rtol=1e-4, atol=1e-4)
