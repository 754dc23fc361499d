"""One rank of two: a taper with our Trainer, then a run whose loss breaks on rank 1 alone. Run by torchrun."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from normsmith.errors import DivergedError
from normsmith.norms.tapered import TaperedNorm
from normsmith.surgery import taper_
from normsmith.training import Trainer
from tests.training.runs import STEPS, TAPER, arguments, small, tapered, windows


def taper(folder: Path) -> dict[str, Any]:
    model = small("gpt", seed=0)
    controller = taper_(model, TAPER)
    # What this rank alone sees, in float64: per micro-batch the two moments of each norm, and the anchor's scale.
    moments: dict[str, list[tuple[float, float]]] = {name: [] for name in controller.sites}
    anchor: list[float] = []

    def watch(name: str) -> Any:
        def hook(module: TaperedNorm, args: tuple[Tensor], output: Tensor) -> None:
            x = args[0].detach().double()
            x = x - x.mean(-1, keepdim=True)
            power = (x * module.gamma.detach().double()).square().sum(-1)
            s = torch.sqrt(x.square().mean(-1) + module.config.eps)
            moments[name].append((float((power / s).mean()), float(power.mean())))

        return hook

    def final(module: Any, args: tuple[Tensor]) -> None:
        h = args[0].detach().double()
        anchor.append(float((h - h.mean(-1, keepdim=True)).square().mean(-1).sqrt().mean()))

    for name, norm in controller.sites.items():
        norm.register_forward_hook(watch(name))
    model.model.norm.register_forward_pre_hook(final)
    read: list[list[int]] = []
    model.register_forward_pre_hook(lambda m, args, kwargs: read.extend(kwargs["input_ids"].tolist()), with_kwargs=True)
    args = arguments(folder / "taper", gradient_accumulation=2, save_every=4)
    trainer = Trainer(model, args, train_dataset=windows(128), controller=controller)
    trainer.train()
    wrapped = trainer.model_wrapped
    assert isinstance(wrapped, DistributedDataParallel)
    return {
        "broadcast_buffers": wrapped.broadcast_buffers,
        "moments": moments,
        "anchor": anchor,
        "read": read,
        "scales": {name: float(norm.scale) for name, norm in controller.sites.items()},
        "target": float(controller.target),
        "gates": [float(norm.gate) for norm in tapered(model)],
        "completed": controller.completed,
        "weights": [float(p.detach().double().sum()) for p in model.parameters()],
        "gate_history": [entry["gate"] for entry in trainer.state.log_history if "gate" in entry],
    }


def diverge(folder: Path, rank: int) -> str:
    model = small()
    calls: list[int] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            output["loss"] = output["loss"] * math.nan
        return output

    model.register_forward_hook(hook)
    try:
        Trainer(model, arguments(folder / "diverged", save_every=2), train_dataset=windows()).train()
    except DivergedError as error:
        return str(error)
    return "the run went on"


def main() -> None:
    folder = Path(sys.argv[1])
    result = taper(folder)
    rank = distributed.get_rank()
    assert distributed.get_world_size() == 2
    assert result["completed"] == STEPS
    result["diverged"] = diverge(folder, rank)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
