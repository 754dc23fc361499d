"""Replace norms whose gate has settled by the plain norm that it chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.norms import Norm
from normsmith.norms.autonorm import AutoNorm
from normsmith.norms.padding import watch_padding
from normsmith.ops.gate import masked_mean, one_hot_maximum
from normsmith.surgery.example import run_example
from normsmith.surgery.native import keep_changes
from normsmith.surgery.replace import carry_hooks, replace_modules
from normsmith.surgery.swap import remember
from normsmith.surgery.table import text_table
from normsmith.surgery.verify import difference, outputs


@dataclass(frozen=True)
class Collapsed:
    """One site that `collapse_` changed.

    `chosen` is the kind of the norm that stands there now (for a static mix, which only lost its selector, the
    weights), `weight` the mean weight that it had. Over the tokens of the example, `mean_deviation` is
    ‖new − old‖/‖old‖ of the site's output and `max_deviation` the same for the token where it is largest; None if the
    site did not run.
    """

    site: str
    chosen: str
    weight: float
    mean_deviation: float | None
    max_deviation: float | None


@dataclass(frozen=True)
class CollapseReport:
    """What `collapse_` did: the sites it changed, (site, reason) of the others.

    `error` is the largest difference of the model's outputs on the example, divided by the largest output.
    """

    collapsed: tuple[Collapsed, ...]
    kept: tuple[tuple[str, str], ...]
    error: float

    def __str__(self) -> str:
        rows = [
            (c.site, c.chosen, f"{c.weight:.3f}", _number(c.mean_deviation), _number(c.max_deviation))
            for c in self.collapsed
        ]
        rows += [(name, f"kept: {why}", "", "", "") for name, why in self.kept]
        table = text_table(("site", "result", "weight", "mean difference", "largest"), rows)
        return f"{table}\nlargest relative difference of the outputs on the example: {self.error:.1e}"


def _number(value: float | None) -> str:
    return "did not run" if value is None else "0 (exact)" if value == 0 else f"{value:.1e}"


@dataclass
class _Seen:
    """Input, output and padding mask of one call of a site."""

    x: Tensor
    y: Tensor
    mask: Tensor | None


@torch.inference_mode(False)
@torch.no_grad()
def collapse_(model: nn.Module, example: Any = None, threshold: float = 0.9, *, force: bool = False) -> CollapseReport:
    """Put the candidate that a settled gate chose in place of each AutoNorm, in place; `restore_` takes it back.

    A gate has settled when its mean noise-free weight for one candidate, over the valid tokens of the example, is at
    least `threshold`; with `evaluation="argmax"`, when one candidate has the largest weight everywhere. Exact where the
    weights are one-hot (argmax, or a static gate that is certain); else the report says how far the outputs differ. A
    static gate that mixes keeps its weights and loses its selector, which changes nothing. The chosen norm has the
    candidate's own parameters, so that an optimiser goes on training them; train or eval mode and hooks are kept. The
    call is atomic.

    Args:
        model: a model with `autonorm` norms.
        example: typical inputs for one forward pass, as in `find_norms`; what is measured holds for these.
        threshold: above 1/2, at most 1.
        force: collapse every site, to the candidate with the largest mean weight.

    Raises:
        InputError: no AutoNorm, a threshold outside (1/2, 1], or no site that has settled.
    """
    if not 0.5 < threshold <= 1:
        raise InputError(f"collapse_ threshold must be above 0.5 and at most 1, got {threshold}")
    model = getattr(model, "_orig_mod", model)
    sites = _sites(model)
    before = outputs(model, example)
    seen = _watch(model, sites, example)
    new: dict[str, nn.Module] = {}
    collapsed: list[Collapsed] = []
    kept: list[tuple[str, str]] = []
    for norm, names in sites.items():
        calls = seen.get(norm, [])
        weights, settled = _settled(norm, calls, threshold)
        module, chosen = _choice(norm, weights, settled or force)
        if module is None:
            kept.append((names[0], chosen))
            continue
        mean, largest = _deviations(module, calls)
        collapsed.append(Collapsed(names[0], chosen, float(weights.max()), mean, largest))
        carry_hooks(norm, module)
        new |= dict.fromkeys(names, module.train(norm.training))
    if not new:
        raise InputError(
            "no gate has settled, so nothing collapses; train longer, lower threshold, or write force=True:\n"
            + text_table(("site", "why"), kept)
        )
    old = {name: model.get_submodule(name) for name in new}
    replace_modules(model, new)
    watch_padding(model)
    try:
        error = difference(before, outputs(model, example))
    except BaseException:
        replace_modules(model, old)
        watch_padding(model)
        raise
    keep_changes(model)
    remember(model, old, [(t, t.detach().clone()) for m in sites for t in (*m.parameters(), *m.buffers())], new)
    return CollapseReport(tuple(collapsed), tuple(kept), error)


def _sites(model: nn.Module) -> dict[AutoNorm, list[str]]:
    found: dict[AutoNorm, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AutoNorm) and name:
            found.setdefault(module, []).append(name)
    if not found:
        raise InputError("no autonorm in this model, so there is nothing to collapse")
    if lost := next((names[0] for norm, names in found.items() if norm.tau.is_meta), None):
        raise InputError(f"{lost} has no values (on the meta device, or offloaded): load the whole model first")
    return found


def _watch(model: nn.Module, sites: dict[AutoNorm, list[str]], example: Any) -> dict[nn.Module, list[_Seen]]:
    seen: dict[nn.Module, list[_Seen]] = {}

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        mask = getattr(module, "token_mask", None)
        seen.setdefault(module, []).append(_Seen(args[0].detach().clone(), output.detach().clone(), mask))

    modes = {module: module.training for module in model.modules()}
    handles = [norm.register_forward_hook(look) for norm in sites]
    try:
        run_example(model.eval(), example)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return seen


def _settled(norm: AutoNorm, calls: list[_Seen], threshold: float) -> tuple[Tensor, bool]:
    """The mean noise-free weights (K,) over all calls of the site, and whether they say that the gate has settled."""
    if norm.config.gate == "static" or bool(norm.static > 0):
        found = [(norm.static_weights, None)]
    elif calls:
        found = [(_weights(norm, call), call.mask) for call in calls]
    else:
        return torch.full((len(norm.candidates),), float("nan")), False
    mean = torch.stack([masked_mean(weights.double(), mask) for weights, mask in found]).mean(0)
    if norm.config.evaluation == "argmax":
        shares = [masked_mean(one_hot_maximum(weights).double(), mask) for weights, mask in found]
        return mean, bool(torch.stack(shares).mean(0).max() == 1)
    return mean, bool(mean.max() >= threshold)


def _weights(norm: AutoNorm, call: _Seen) -> Tensor:
    norm.token_mask = call.mask
    return norm.weights(call.x)


def _choice(norm: AutoNorm, weights: Tensor, take: bool) -> tuple[Norm | None, str]:
    """What to put there and what it is called, or None and the reason."""
    shares = ", ".join(f"{name} {float(w):.2f}" for name, w in zip(norm.names, weights, strict=True))
    if bool(weights.isnan().any()):
        return None, "did not run on the example"
    if take:
        k = int(weights.argmax())
        candidate = norm.candidates[k]
        assert isinstance(candidate, Norm)
        # A module of its own with the same parameters: it gets the site's hooks, which the candidate must not have.
        return type(candidate).from_site(candidate, norm.width, candidate.config), norm.names[k]
    if norm.config.gate == "selector" and bool(norm.static > 0):
        return _without_selector(norm), f"static mix without selector ({shares})"
    return None, f"has not settled ({shares})"


def _without_selector(norm: AutoNorm) -> AutoNorm:
    config = norm.config.model_copy(update={"gate": "static", "tau_end": None})
    new = AutoNorm(norm.width, config)
    new.to(device=norm.static_weights.device)
    for i, candidate in enumerate(norm.candidates):
        assert isinstance(candidate, Norm)
        new.candidates[i] = type(candidate).from_site(candidate, norm.width, candidate.config)
    new.static_weights.copy_(norm.static_weights)
    return new


def _deviations(module: Norm, calls: list[_Seen]) -> tuple[float | None, float | None]:
    """How far the site's outputs move over all its calls: ‖new − old‖/‖old‖, and the largest one of a token."""
    if not calls:
        return None, None
    lost, total, largest = 0.0, 0.0, 0.0
    training = module.training
    for call in calls:
        if hasattr(module, "token_mask"):
            setattr(module, "token_mask", call.mask)  # noqa: B010 (norms that pool over tokens have it)
        new, old = type(module).forward(module.eval(), call.x).double(), call.y.double()
        rows = torch.linalg.vector_norm(new - old, dim=-1) / torch.linalg.vector_norm(old, dim=-1).clamp_min(1e-30)
        if call.mask is not None and call.mask.shape == rows.shape:
            real = (call.mask != 0)[..., None]
            new, old, rows = new.where(real, 0), old.where(real, 0), rows.where(real[..., 0], 0)
        lost, total = lost + float((new - old).square().sum()), total + float(old.square().sum())
        largest = max(largest, float(rows.max()))
    module.train(training)
    return (lost / max(total, 1e-60)) ** 0.5, largest
