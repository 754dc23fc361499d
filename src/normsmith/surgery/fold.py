"""Absorb norms that are linear now into the linear layers that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from normsmith.errors import InputError, NotFoldableError, VerificationError
from normsmith.norms import LinearForm, Norm
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import close_controllers
from normsmith.surgery.find import NONE_FOUND, Site, Sites, find_norms, run_example
from normsmith.surgery.swap import replace_modules
from normsmith.surgery.table import text_table


@dataclass(frozen=True)
class FoldReport:
    """What `fold_` did: sites removed, sites kept with the reason, and the measured error.

    `error` is the largest difference of the outputs on the probe input, divided by the largest output; None if it was
    not measured.
    """

    removed: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    untied: bool
    error: float | None

    def __str__(self) -> str:
        rows = [(name, "folded") for name in self.removed] + [(name, f"kept: {why}") for name, why in self.kept]
        lines = [text_table(("site", "result"), rows)]
        if self.untied:
            lines.append("the output head was tied to the embeddings and has its own weights now")
        if self.error is not None:
            lines.append(f"largest relative difference of the outputs on the probe input: {self.error:.1e}")
        return "\n".join(lines)


def fold_(
    model: nn.Module, *, example: Any = None, verify: bool = True, tolerance: float = 1e-4, strict: bool = False
) -> FoldReport:
    """Remove every norm that is linear now by scaling the weights of its readers, in place; the function is kept.

    For y = scale ⊙ (x − mean) + shift read by W·y + b: W′ = W·diag(scale)·(I − 11ᵀ/d), b′ = b + W·shift, in float64,
    stored in the old dtype. The call is atomic: an error of any kind leaves the model as it was.

    Args:
        model: any model whose norms `find_norms` sees.
        example: input for one forward pass; also the probe of the verification.
        verify: compare the outputs before and after.
        tolerance: largest relative difference accepted, for float32 models (in half precision: ten roundings).
        strict: raise if any linear norm cannot be folded, instead of listing it.

    Raises:
        InputError: no norm is linear now; for an unfinished taper the message says how far it is.
        NotFoldableError: with `strict`, the sites that cannot be folded and why.
        VerificationError: the outputs differ by more than the tolerance.
    """
    model = getattr(model, "_orig_mod", model)
    sites = find_norms(model, example)
    plan, kept = _plan(sites)
    if not plan:
        raise InputError(_nothing_to_fold(sites, kept))
    if strict and (blocked := [(s.name, s.blocked) for s in sites if s.blocked and _form(s) is not None]):
        raise NotFoldableError("cannot be folded: " + "; ".join(f"{name}: {why}" for name, why in blocked))
    before = _outputs(model, example) if verify else None
    undo: list[Callable[[], None]] = []
    try:
        untied = _untie(model, [reader for site, _ in plan for reader in site.readers], undo)
        for site, form in plan:
            for reader in site.readers:
                _absorb(model.get_submodule(reader), form, undo)
            _remove(model, site, undo)
        error = None if before is None else _relative(before, _outputs(model, example))
        if error is not None and not error <= max(tolerance, 10 * torch.finfo(_dtype(model)).eps):
            raise VerificationError(
                f"folding changed the outputs by {error:.1e}, allowed {tolerance:.0e} (relative); "
                "the model is as it was"
            )
    except BaseException:
        for action in reversed(undo):
            action()
        raise
    close_controllers(model)
    return FoldReport(tuple(site.name for site, _ in plan), tuple(kept), untied, error)


def _form(site: Site) -> LinearForm | None:
    return site.module.linear_form() if isinstance(site.module, Norm) else None


def _plan(sites: Sites) -> tuple[list[tuple[Site, LinearForm]], list[tuple[str, str]]]:
    plan: list[tuple[Site, LinearForm]] = []
    kept: list[tuple[str, str]] = []
    for site in sites:
        form = _form(site)
        if form is None:
            kept.append((site.name, f"{site.kind} depends on the token" + _gate_text(site.module)))
        elif site.blocked:
            kept.append((site.name, site.blocked))
        else:
            plan.append((site, form))
    return plan, kept


def _gate_text(module: nn.Module) -> str:
    return f" (gate {float(module.gate):.3g})" if isinstance(module, TaperedNorm) else ""


def _nothing_to_fold(sites: Sites, kept: list[tuple[str, str]]) -> str:
    gates = [float(site.module.gate) for site in sites if isinstance(site.module, TaperedNorm)]
    if any(gates):
        return (
            f"the taper is not complete: the gate is {max(gates):.3g}, {100 * (1 - max(gates)):.0f} % of the way to 0; "
            "train to the end of the schedule, then fold"
        )
    if not kept:
        return f"nothing to fold: {NONE_FOUND}"
    return "nothing to fold, no norm is linear:\n" + text_table(("site", "why"), kept)


def _untie(model: nn.Module, readers: list[str], undo: list[Callable[[], None]]) -> bool:
    """Give the output head its own weights if it must be scaled and shares them with the embeddings."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # pyright: ignore[reportCallIssue]
    shared = cast("nn.Parameter", getattr(embeddings, "weight", None))
    tied = [r for r in readers if shared is not None and model.get_submodule(r).weight is shared]
    for reader in tied:
        own = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        _assign(model.get_submodule(reader), "weight", own, undo)
    config = getattr(model, "config", None)
    if tied and getattr(config, "tie_word_embeddings", False):
        for owner, name, value in ((config, "tie_word_embeddings", False), (model, "all_tied_weights_keys", {})):
            if hasattr(owner, name):
                _assign(owner, name, value, undo)
    return bool(tied)


def _absorb(linear: Any, form: LinearForm, undo: list[Callable[[], None]]) -> None:
    bias, wide = linear.bias, linear.weight.detach().double()
    scaled = wide * form.scale.to(wide.device)
    if form.centred:
        scaled = scaled - scaled.mean(dim=1, keepdim=True)  # W·(I − 11ᵀ/d)
    # Before the weight is overwritten: in a float64 model `wide` is the weight itself.
    shift = None if form.shift is None else wide @ form.shift.to(wide.device)
    _copy(linear.weight, scaled, undo)
    if shift is None:
        return
    if bias is None:
        new = nn.Parameter(shift.to(linear.weight.dtype), requires_grad=linear.weight.requires_grad)
        _assign(linear, "bias", new, undo)
    else:
        _copy(bias, bias.detach().double() + shift, undo)


def _copy(parameter: nn.Parameter, value: Tensor, undo: list[Callable[[], None]]) -> None:
    saved = parameter.detach().clone()

    def restore() -> None:
        parameter.data.copy_(saved)

    undo.append(restore)
    parameter.data.copy_(value)


def _assign(owner: Any, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    old = getattr(owner, name)
    undo.append(lambda: setattr(owner, name, old))
    setattr(owner, name, value)


def _remove(model: nn.Module, site: Site, undo: list[Callable[[], None]]) -> None:
    parent, _, leaf = site.name.rpartition(".")
    undo.append(lambda: setattr(model.get_submodule(parent), leaf, site.module))
    replace_modules(model, {site.name: None})


@torch.no_grad()
def _outputs(model: nn.Module, example: Any) -> Tensor:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        output = run_example(model, example)
    finally:
        for module, mode in modes.items():
            module.training = mode
    for name in ("logits", "last_hidden_state"):
        if hasattr(output, name):
            return getattr(output, name).double()
    return (output[0] if isinstance(output, tuple | list) else output).double()


def _relative(before: Tensor, after: Tensor) -> float:
    return float((before - after).abs().max() / before.abs().max().clamp_min(1e-30))


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
