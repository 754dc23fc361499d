"""One connection at growing depth: time and memory per block, and how well the stream keeps its length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.bench.step import step_case
from normsmith.bench.timing import interleave
from normsmith.diagnostics.blocks import evaluating, find_blocks, watching
from normsmith.errors import InputError
from normsmith.models import ModelConfig
from normsmith.studies.arms import arm_recipe
from normsmith.studies.recipe import Recipe
from normsmith.studies.runner import build_scheduled
from normsmith.training import TrainingConfig

_VOCABULARY, _HEADS = 256, 4


@dataclass(frozen=True)
class DepthCost:
    """A model of one depth.

    Attributes:
        layers: blocks.
        seconds: of one optimiser step (forward, backward, AdamW), the median.
        per_layer: seconds that each block beyond the shallowest model's adds; None for that one.
        saved: bytes that one forward pass keeps for the backward pass, without the parameters.
        saved_per_layer: as `per_layer`.
        drift: largest |‖h_l‖ / ‖h_0‖ − 1| over tokens and blocks in float32, after one step of training.
        drift_bf16: the same under bfloat16 autocast.
    """

    layers: int
    seconds: float
    per_layer: float | None
    saved: int
    saved_per_layer: float | None
    drift: float
    drift_bf16: float


def bench_depth(
    arm: str = "proj",
    depths: Sequence[int] = (6, 12, 24, 48, 96),
    width: int = 64,
    batch: int = 4,
    sequence: int = 64,
    rounds: int = 9,
    tick: Callable[[int], None] | None = None,
) -> list[DepthCost]:
    """Training steps of models that differ in depth alone, eager, interleaved.

    Args:
        arm: as in `normsmith compare`.
        depths: numbers of blocks, growing; what a block costs is counted from the first on.
        width: of the model; four heads.
        batch: sequences per step.
        sequence: tokens of each.
        rounds: measured rounds.
        tick: called after each round.

    Raises:
        InputError: an unknown arm, or depths that do not grow.
    """
    if len(depths) < 2 or sorted(set(depths)) != list(depths) or depths[0] < 1:
        raise InputError(
            f"depths {', '.join(map(str, depths))}: at least two numbers of blocks, each larger than the last"
        )
    ids = torch.randint(_VOCABULARY, (batch, sequence), generator=torch.Generator().manual_seed(0))
    models = {depth: _model(arm, depth, width) for depth in depths}
    cases = {
        str(depth): step_case(model, None, {"input_ids": ids, "labels": ids}, compiled=False)
        for depth, model in models.items()
    }
    timings = interleave(cases, rounds, warmup=1, tick=tick)
    saved = {depth: saved_bytes(model, ids) for depth, model in models.items()}
    first = depths[0]
    found: list[DepthCost] = []
    for depth, model in models.items():
        beyond = depth - first
        seconds = timings[str(depth)].median
        found.append(
            DepthCost(
                layers=depth,
                seconds=seconds,
                per_layer=(seconds - timings[str(first)].median) / beyond if beyond else None,
                saved=saved[depth],
                saved_per_layer=(saved[depth] - saved[first]) / beyond if beyond else None,
                drift=stream_drift(model, ids),
                drift_bf16=stream_drift(model, ids, torch.bfloat16),
            )
        )
    return found


def _model(arm: str, depth: int, width: int) -> nn.Module:
    base = Recipe(
        model=ModelConfig(hidden_size=width, num_hidden_layers=depth, num_attention_heads=_HEADS),
        training=TrainingConfig(max_steps=1000),
    )
    model, controller = build_scheduled(arm_recipe(base, arm), _VOCABULARY)
    if controller is not None:
        raise InputError(f"{arm}: a schedule changes the model in the course of a run; the depth sweep has none")
    return model.train()


def saved_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes that one forward pass with its loss keeps for the backward pass, parameters not counted."""
    return kept_bytes(lambda: model(input_ids=ids, labels=ids).loss, model.parameters())


def kept_bytes(forward: Callable[[], Any], own: Iterable[Tensor]) -> int:
    """Bytes that `forward` keeps for the backward pass beside the tensors `own`; views of one storage count once."""
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()  # alive until all is counted, so that no address is used twice
    del result
    return sum(kept.values())


@torch.no_grad()
def stream_drift(model: nn.Module, ids: Tensor, autocast: torch.dtype | None = None) -> float:
    """Largest relative change of a token's ‖h‖ from the entry of the first block to the end of any block.

    Args:
        model: any model with blocks that pass a stream on.
        ids: token ids (batch, time).
        autocast: dtype of matrix products; the norm itself is taken in float64.
    """
    blocks = find_blocks(model, ids)
    enabled = autocast is not None
    with evaluating(model), watching(blocks) as stream, torch.autocast(ids.device.type, autocast, enabled=enabled):
        model(input_ids=ids)
    lengths = torch.stack([h.double().norm(dim=-1) for h in stream])
    return float((lengths / lengths[0] - 1).abs().max())
