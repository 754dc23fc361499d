"""Compare a model's outputs after a change with those of a float64 copy made before it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normsmith.errors import VerificationError
from normsmith.surgery.example import run_example

_LARGEST_COPY = 300_000_000  # parameters; a larger model is compared with itself in its own dtype


class Probe:
    """Outputs of a model on one input before a change: in its dtype, and of a float64 copy as the exact ones.

    Without an example of the user's, the input is another one than that which was traced.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.example = example
        before = outputs(model, example)
        exact = self._exact(model, example)
        self.exact = before if exact is None else exact
        self.error_before = None if exact is None else difference(exact, before)
        if not all(bool(t.isfinite().all()) for t in (*before, *self.exact)):
            raise VerificationError(
                "the model's outputs on the probe input are not finite before any change, so nothing can be verified; "
                "pass another example=, or verify=False"
            )
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    @staticmethod
    def _exact(model: nn.Module, example: Any) -> list[Tensor] | None:
        if sum(p.numel() for p in model.parameters()) > _LARGEST_COPY:
            return None
        twin = copy.deepcopy(model).double()
        if hasattr(twin, "set_experts_implementation") and hasattr(twin.config, "_experts_implementation"):
            cast("Any", twin).set_experts_implementation("eager")  # the grouped product knows no float64
        try:
            return outputs(twin, _double(example))
        except Exception:  # a model that makes float32 tensors itself, or has kernels of half precision only
            return None

    def check(self, model: nn.Module, tolerance: float, what: str) -> float:
        """The error of the model now; VerificationError if it is larger than allowed."""
        error = difference(self.exact, outputs(model, self.example))
        allowed = max(tolerance, 10 * torch.finfo(self.dtype).eps, 4 * (self.error_before or 0.0))
        if not error <= allowed:
            raise VerificationError(
                f"{what} changed the outputs by {error:.1e}, allowed {allowed:.0e} (relative); the model is as it was"
            )
        return error


@torch.no_grad()
def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """Every floating-point tensor the model returns in evaluation mode, in float64."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        result = run_example(model, example, seed=1)
    finally:
        for module, mode in modes.items():
            module.training = mode
    found = [t.double() for t in tensors_of(result) if t.is_floating_point()]
    if not found:
        raise VerificationError(
            f"{type(model).__name__} returns no floating-point tensor ({type(result).__name__}), so nothing can be "
            "verified; pass verify=False where there is such an option"
        )
    return found


def tensors_of(result: Any) -> list[Tensor]:
    """Every tensor in what a model returns: mappings, sequences, dataclasses. What a cache keeps is no result."""
    found: list[Tensor] = []
    seen: set[int] = set()
    open_ones = [result]
    while open_ones:
        leaf = open_ones.pop(0)
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            inside = tree_leaves(leaf)
            if len(inside) == 1 and inside[0] is leaf:
                record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
                inside = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)] if record else []
            open_ones += inside
    return found


def difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """Largest absolute difference, each output's divided by its largest value."""
    if len(expected) != len(found):
        return float("inf")
    relative = [
        float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
        for a, b in zip(expected, found, strict=True)
        if a.numel()
    ]
    return max((r if r == r else float("inf") for r in relative), default=0.0)


def _double(example: Any) -> Any:
    if isinstance(example, Tensor):
        return example.double() if example.is_floating_point() else example
    if hasattr(example, "items"):
        return {key: _double(value) for key, value in example.items()}
    return type(example)(_double(value) for value in example) if type(example) in (tuple, list) else example
