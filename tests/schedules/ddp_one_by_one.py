"""One rank of two: norms removed one by one, each rank from tokens of its own. Run with rank, store and output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import distributed

import normsmith as ns
from tests.schedules.test_sequential import CONFIG, IDS, LAST, model_of


def main(rank: int, store: str, output: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = model_of()
    controller = ns.remove_one_by_one_(model, CONFIG, steps=LAST)
    seen: dict[str, list[float]] = {name: [] for name in controller.sites}
    for _ in range(LAST):
        model(input_ids=IDS.chunk(2)[rank])
        for name, norm in controller.sites.items():
            seen[name].append(float(norm.sum_sigma))
        controller.step()
    found = {name: [float(norm.sigma), float(norm.sigma_first)] for name, norm in controller.sites.items()}
    weights = float(torch.stack([p.detach().double().sum() for p in model.parameters()]).sum())
    Path(output).write_text(json.dumps({"found": found, "seen": seen, "weights": weights}))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
