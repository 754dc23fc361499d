"""The depth sweep: what 96 blocks keep of the stream's length, and what each block costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normsmith.bench import bench_depth
from normsmith.bench.depth import saved_bytes, stream_drift
from normsmith.errors import InputError
from tests.tiny import tiny

IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("arm", ["proj", "cay", "geo", "sphere:p=0.5,decay=none"])
def test_the_sphere_keeps_its_length_through_96_blocks(arm: str) -> None:
    shallow, deep = bench_depth(arm, (2, 96), width=32, batch=2, sequence=16, rounds=1)
    assert deep.drift <= 1e-5
    assert deep.drift_bf16 <= 1e-3
    assert shallow.drift <= deep.drift * 2 + 1e-7
    assert deep.per_layer is not None
    assert deep.per_layer > 0


def test_what_does_not_keep_it_is_seen() -> None:
    _, deep = bench_depth("pre", (2, 8), width=32, batch=2, sequence=16, rounds=1)
    assert deep.drift > 0.01


def test_every_block_keeps_as_many_bytes() -> None:
    found = bench_depth("proj", (2, 4, 8), width=32, batch=2, sequence=16, rounds=1)
    assert found[0].saved_per_layer is None
    assert found[1].saved_per_layer == found[2].saved_per_layer
    assert found[1].saved_per_layer is not None
    assert found[1].saved_per_layer > 2 * 16 * 32 * 4  # at least the stream itself


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> object:
        x = torch.arange(6.0, requires_grad=True).view(2, 3)
        loss = (x * x * self.weight).sum()  # x twice, as one storage; x² once
        return type("Output", (), {"loss": loss})


def test_bytes_kept_are_counted_once_and_without_parameters() -> None:
    assert saved_bytes(Square(), IDS) == 2 * 6 * 4


def test_drift_is_the_worst_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", vocab_size=64)
    layers = model.model.layers
    for layer in layers:
        monkeypatch.setattr(layer, "forward", lambda h, **kwargs: h)
    assert stream_drift(model, IDS) == 0
    factor = torch.ones(16, 1)
    factor[5] = 1.25
    monkeypatch.setattr(layers[-1], "forward", lambda h, **kwargs: h * factor)
    assert stream_drift(model, IDS) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("depths", [(6,), (6, 6), (12, 6), (0, 6)])
def test_depths_must_grow(depths: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="at least two numbers of blocks, each larger than the last"):
        bench_depth("proj", depths)


def test_a_schedule_is_no_arm_of_a_depth_sweep() -> None:
    with pytest.raises(InputError, match="rmsnorm.taper: a schedule changes the model"):
        bench_depth("rmsnorm+taper", (1, 2), width=32)
