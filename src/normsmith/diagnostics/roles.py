"""What each weight matrix of a model is for, found by what it does and when it runs: no names, no list of families."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.surgery.attention import query_key_rows, query_rows
from normsmith.surgery.example import run_example

ROLES = ("q", "k", "v", "o", "mlp_in", "mlp_out", "embedding", "head")


@dataclass(frozen=True)
class WeightPart:
    """Rows of one weight matrix with one role; `rows` (n,) bool along `axis`, None for all of it."""

    role: str
    parameter: str
    rows: Tensor | None = None
    axis: int = 0

    def norm(self, gradient: Tensor) -> Tensor:
        """The Frobenius norm of the part."""
        part = gradient if self.rows is None else gradient.movedim(self.axis, 0)[self.rows.to(gradient.device)]
        return part.double().norm()


def weight_parts(model: nn.Module) -> list[WeightPart]:
    """The parts of the weights of a causal language model by role: those of `ROLES`; what has none of them is left out.

    Queries and keys are the outputs of linear layers that do nothing on a sequence of one token. Beside them stand
    values, and last in the same module the output projection. Where two or more other linear layers of a block stand
    side by side, the last one to run is `mlp_out`, those before it `mlp_in`. An output head tied to the embeddings
    counts as embedding.
    """
    order, axes = _linears(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore[reportCallIssue]
    inner = {n: m for n, m in order.items() if m is not head}
    keys = query_key_rows(model, inner)
    queries = query_rows(model, inner)
    parts = _embeddings(model, head)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in inner:
        groups[name.rpartition(".")[0]].append(name)
    for names in groups.values():
        if len(names) < 2:
            continue
        attention = any(name in keys and bool(keys[name].any()) for name in names)
        for name in names:
            last = name == names[-1]
            if not attention:
                parts.append(WeightPart("mlp_out" if last else "mlp_in", f"{name}.weight"))
            elif last:
                parts.append(WeightPart("o", f"{name}.weight"))
            elif name in keys:
                q = queries.get(name, torch.zeros_like(keys[name])) & keys[name]
                masks = {"q": q, "k": keys[name] & ~q, "v": ~keys[name]}
                parts += [WeightPart(r, f"{name}.weight", m, axes[name]) for r, m in masks.items() if bool(m.any())]
    return parts


def _embeddings(model: Any, head: nn.Module | None) -> list[WeightPart]:
    tables = {m: n for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    parts = [WeightPart("embedding", f"{name}.weight") for name in tables.values()]
    shared = {m.weight for m in tables}
    if head is not None and head.weight not in shared:
        name = next(n for n, m in model.named_modules() if m is head)
        parts.append(WeightPart("head", f"{name}.weight"))
    return parts


def _linears(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, int]]:
    """The modules that multiply with their own weight matrix, in the order they run, and the axis of its outputs."""
    order: dict[str, nn.Module] = {}
    axes: dict[str, int] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
                return
            rows, columns = module.weight.shape  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
            width, read = output.shape[-1], args[0].shape[-1]
            if args[0].is_floating_point() and (width, read) in ((rows, columns), (columns, rows)):
                order.setdefault(name, module)
                axes[name] = (
                    0 if isinstance(module, nn.Linear) or (rows, columns) == (width, read) != (read, width) else 1
                )

        return hook

    found = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "weight", None), nn.Parameter)}
    handles = [m.register_forward_hook(hook_for(n)) for n, m in found.items() if m.weight.ndim == 2]  # pyright: ignore[reportAttributeAccessIssue]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            run_example(model)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return order, axes
