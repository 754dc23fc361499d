"""Two real processes that see different entropies: both decide by the mean, whatever each would do alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn

import normsmith as ns
from normsmith.norms.autonorm import AutoNorm

LIMIT = 0.3
CASES = [((0.1, 0.6), True), ((0.5, 0.0), False)]
"""Entropies of the two ranks, and whether their mean freezes under the published rule."""


def decide(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found: list[object] = []
    for entropies, _ in CASES:
        site = AutoNorm(8)
        controller = ns.freeze_gates_(nn.Sequential(site), {"freeze_step": 1, "entropy": LIMIT}, steps=2)
        site.train()(torch.randn(2, 3, 8))
        with torch.no_grad():  # as if the batches of this rank had this entropy
            site.entropy_sum.fill_(entropies[rank] * float(site.batches))
        controller.step()
        found.append([bool(site.frozen), any(p.requires_grad for p in site.selector_parameters()), controller.decided])
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def test_the_mean_of_the_ranks_decides_for_both(tmp_path: Path) -> None:
    multiprocessing.spawn(decide, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for (entropies, frozen), (is_frozen, trains, decided) in zip(CASES, first, strict=True):
        assert (is_frozen, trains) == (frozen, not frozen)
        assert list(decided.values()) == [pytest.approx(sum(entropies) / 2)]
