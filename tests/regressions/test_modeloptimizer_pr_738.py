"""Model-Optimizer PR 738; auto-round 1167, wanda 79: calibration means were wrong in bfloat16, padding polluted them.

Kind of fault: sums in low precision, and an ignored mask. The statistics of a taper are float32, and a padded batch has
those of its rows without padding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normsmith.norms import norms
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig, TaperController
from normsmith.surgery import taper_
from tests.tiny import tiny

TAPERED = [kind for kind in norms if issubclass(norms.get(kind), TaperedNorm)]
NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "opt": {"dropout": 0.0}}
SUMS = ("sum_scaled", "sum_power")


@pytest.mark.parametrize("kind", TAPERED)
def test_a_thousand_averaging_steps_in_bfloat16_reach_the_target(kind: str) -> None:
    class Sub(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.final = norms.get(kind)(16), norms.get(kind)(16)
            self.linear, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.final(x + self.linear(self.norm(x))))

    model = Sub().bfloat16()
    x = (3 * torch.randn(64, 16) + 1).bfloat16()
    controller = taper_(model, TaperConfig(warmup=0.5, momentum=0.01, scale_loss=0), steps=2000, example=x)
    for _ in range(1000):
        model(x)
        controller.step()
    wide = x.double() - (x.double().mean(-1, keepdim=True) if controller.sites["norm"].centred else 0)
    power = wide.square().sum(-1)
    exact = (power / (power / 16 + 1e-6).sqrt()).mean() / power.mean()
    assert controller.moments.dtype == torch.float32
    assert float(controller.sites["norm"].scale) == pytest.approx(float(exact), rel=0.01)


def statistics(model: Any, controller: TaperController, ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Token sums of every site and the anchor's, from one training forward pass."""
    for norm in controller.sites.values():
        for name in (*SUMS, "batches"):
            getattr(norm, name).zero_()
    model(input_ids=ids, attention_mask=mask)
    found = {f"{s}.{n}": getattr(norm, n).clone() for s, norm in controller.sites.items() for n in SUMS}
    return {**found, "loss": torch.as_tensor(controller.auxiliary_loss()).detach()}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma2", "opt"])
def test_padding_does_not_count(family: str, side: str) -> None:
    model = tiny(family, **NO_DROPOUT.get(family, {}))
    controller = taper_(model, TaperConfig(warmup=0.1, scale_loss=1.0), steps=100)
    controller.completed = 50  # past the warm-up, so that the scale loss counts
    model.train()
    rows = [torch.randint(3, 60, (1, length)) for length in (5, 12)]
    padded, mask = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(12 - row.shape[1], None) if side == "left" else slice(row.shape[1])
        padded[i, place], mask[i, place] = row[0], 1
    position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
    if side == "left" and family != "opt":  # which counts positions itself
        model.register_forward_pre_hook(
            lambda m, a, k: (a, {**k, "position_ids": position_ids} if k["attention_mask"] is not None else k),
            with_kwargs=True,
        )
    single = [statistics(model, controller, row, None) for row in rows]
    expected = {name: (5 * single[0][name] + 12 * single[1][name]) / 17 for name in single[0]}
    found = statistics(model, controller, padded, mask)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    polluted = statistics(model, controller, padded, torch.ones_like(mask))
    assert any(abs(float(polluted[n] / v) - 1) > 0.01 for n, v in expected.items()), "padding would matter"


def test_a_mask_of_other_tokens_is_not_used_and_none_is_kept() -> None:
    model = tiny("llama").train()
    controller = taper_(model, TaperConfig(warmup=0.1), steps=100)
    ids = torch.randint(3, 60, (2, 12))
    plain = statistics(model, controller, ids, None)
    statistics(model, controller, ids, (torch.arange(12) < 4).long().expand(2, 12))
    again = statistics(model, controller, ids, None)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    controller.close()
    assert not model._forward_pre_hooks
