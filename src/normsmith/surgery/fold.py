"""Absorb norms, or their gains and shifts, into the linear layers beside them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import nn

from normsmith.errors import InputError, NotFoldableError
from normsmith.norms import LinearForm, Norm
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import close_controllers
from normsmith.surgery.absorb import Undo, into_producer, into_reader, problem
from normsmith.surgery.find import NONE_FOUND, Site, Sites, find_norms
from normsmith.surgery.native import keep_changes
from normsmith.surgery.replace import replace_modules
from normsmith.surgery.select import Where, select_sites
from normsmith.surgery.swap import forget_swaps
from normsmith.surgery.table import text_table
from normsmith.surgery.uses import Reader
from normsmith.surgery.verify import Probe

Mode = Literal["full", "affine"]


@dataclass(frozen=True)
class FoldReport:
    """What `fold_` did: sites removed, sites that lost gain and shift only, sites kept with the reason, and the error.

    `error` is the largest difference between the outputs on the probe input and those of a float64 copy of the model as
    it was, divided by the largest output; None if it was not measured. `error_before` is the same for the model itself
    before, in its own dtype. `unseen` names modules with weights that did not run on the example: should they read a
    folded norm in another mode, they have not been adapted. `final` is the final norm if it was folded: the hidden
    states that it gave out have changed, the model's outputs have not.
    """

    removed: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    untied: bool
    error: float | None
    absorbed: tuple[str, ...] = ()
    error_before: float | None = None
    unseen: tuple[str, ...] = ()
    final: str = ""

    def __str__(self) -> str:
        rows = [(name, "folded") for name in self.removed]
        rows += [(name, "gain and shift absorbed, norm kept without them") for name in self.absorbed]
        rows += [(name, f"kept: {why}") for name, why in self.kept]
        lines = [text_table(("site", "result"), rows)]
        if self.untied:
            lines.append("the output head was tied to the embeddings and has its own weights now")
        if self.unseen:
            lines.append(
                f"did not run on the example, so not adapted if they read a folded norm: {', '.join(self.unseen)}"
            )
        if self.final:
            lines.append(f"hidden states after {self.final} are now without what was folded; the outputs are the same")
        if self.error is not None:
            before = "" if self.error_before is None else f" (the model before: {self.error_before:.1e})"
            lines.append(f"largest relative difference of the outputs on the probe input: {self.error:.1e}{before}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Step:
    site: Site
    form: LinearForm
    forward: bool  # into the readers, else into the producer


@torch.inference_mode(False)  # a bias made in inference mode could never be trained
@torch.no_grad()
def fold_(
    model: nn.Module,
    mode: Mode = "full",
    *,
    where: Where = None,
    example: Any = None,
    verify: bool = True,
    tolerance: float = 1e-4,
    strict: bool = False,
) -> FoldReport:
    """Absorb norms into the weights beside them, in place; the function is kept.

    For y = scale ⊙ (x − mean) + shift read by W·y + b: W′ = W·diag(scale)·(I − 11ᵀ/d), b′ = b + W·shift, in float64,
    stored in the old dtype; a missing bias is made. A linear norm that joins the residual stream goes into the linear
    layer whose output it alone reads. The call is atomic: an error of any kind leaves the model as it was.

    Args:
        model: any model whose norms `find_norms` sees.
        mode: `full` removes every norm that is linear now (tapered to the end, identity); `affine` moves gain and shift
            of LayerNorms and RMSNorms into their readers and leaves the norm with gain 1 and shift 0.
        where: sites to fold, as in `select_sites`; default all.
        example: input for one forward pass; also the probe of the verification.
        verify: compare the outputs with those of a float64 copy of the model before.
        tolerance: largest relative difference accepted, for float32 models (in half precision: ten roundings, or four
            times the difference that the model had before).
        strict: raise if any site cannot be folded, instead of listing it.

    Raises:
        InputError: nothing can be folded; for an unfinished taper the message says how far it is.
        NotFoldableError: with `strict`, the sites that cannot be folded and why.
        VerificationError: the outputs differ by more than the tolerance.
    """
    if mode not in ("full", "affine"):
        raise InputError(f"fold_ mode must be 'full' or 'affine', got {mode!r}")
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.Module) and (lost := next((n for n, p in model.named_parameters() if p.is_meta), None)):
        raise InputError(f"{lost} has no values (on the meta device, or offloaded): load the whole model first")
    sites = find_norms(model, example)
    plan, kept = _plan(model, select_sites(sites, where) if sites else [], mode)
    if strict and (
        blocked := [(s.name, why) for s in sites if (why := dict(kept).get(s.name)) and _candidate(s, mode)]
    ):
        raise NotFoldableError("cannot be folded: " + "; ".join(f"{name}: {why}" for name, why in blocked))
    if not plan:
        raise InputError(_nothing_to_fold(sites, kept, mode))
    if strict and sites.unseen:
        raise NotFoldableError(f"{', '.join(sites.unseen)} did not run on the example, so what they read is not known")
    probe = Probe(model, example) if verify else None
    undo = Undo()
    try:
        untied = _untie(model, plan, undo)
        for step in plan:
            _apply(model, step, mode, undo, untied)
        error = None if probe is None else probe.check(model, tolerance, "folding")
    except BaseException:
        undo.run()
        raise
    names = tuple(step.site.name for step in plan)
    removed, absorbed = (names, ()) if mode == "full" else ((), names)
    if mode == "full":
        close_controllers(model)
    keep_changes(model)
    forget_swaps(model)
    final = next((step.site.name for step in plan if step.site.role == "final"), "")
    before = None if probe is None else probe.error_before
    return FoldReport(removed, tuple(kept), bool(untied), error, absorbed, before, sites.unseen, final)


def _candidate(site: Site, mode: Mode) -> bool:
    return _form(site, mode) is not None


def _form(site: Site, mode: Mode) -> LinearForm | None:
    if mode == "full":
        return site.module.linear_form() if isinstance(site.module, Norm) else None
    if not site.facts.gain_last or len(site.facts.shape) != 1:
        return None
    scale, shift = site.facts.scale(site.module), site.facts.shift(site.module)
    if scale is None and shift is None:
        return None
    return LinearForm(torch.ones((), dtype=torch.float64) if scale is None else scale, shift, centred=False)


def _plan(model: nn.Module, sites: list[Site], mode: Mode) -> tuple[list[_Step], list[tuple[str, str]]]:
    plan: list[_Step] = []
    kept: list[tuple[str, str]] = []
    for site in sites:
        step = _step(model, site, mode)
        if isinstance(step, str):
            kept.append((site.name, step))
        else:
            plan.append(step)
    return plan, kept


def _step(model: nn.Module, site: Site, mode: Mode) -> _Step | str:
    """How to fold the site, or why not."""
    if (form := _form_or_reason(site, mode)) and isinstance(form, str):
        return form
    form = cast("LinearForm", form)
    shifted = form.shift is not None and bool(form.shift.any())
    if not site.blocked and (lost := _lost_ties(model, site.untie)):
        return (
            f"{site.untie[0]} shares its weights with other modules, and untying it would also untie {lost[0]}, which "
            "transformers would then not save"
        )
    if not site.blocked:
        problems = [problem(model, reader, shifted) for reader in site.consumers]
        return "; ".join(p for p in problems if p) or _Step(site, form, forward=True)
    if mode == "full" and site.producer is not None and _covers(model, site.producer, site.width):
        biased = shifted or f"{site.producer.bias}" in dict(model.named_parameters())
        form = form._replace(scale=form.scale.expand(site.width))
        return problem(model, site.producer, biased) or _Step(site, form, forward=False)
    return site.blocked


def _covers(model: nn.Module, producer: Reader, width: int) -> bool:
    """Whether the norm's inputs are the results of all of a weight matrix, or of each head of them."""
    rows = model.get_parameter(producer.weight).shape[1 - producer.axis] if len(producer.bounds) == 2 else 1
    return rows % width == 0


def _form_or_reason(site: Site, mode: Mode) -> LinearForm | str:
    if any(p.is_meta for p in site.module.parameters(recurse=False)):
        return "its parameters have no values (on the meta device, or offloaded)"
    form = _form(site, mode)
    if form is not None:
        return form
    if mode == "full":
        gate = f" (gate {float(site.module.gate):.3g})" if isinstance(site.module, TaperedNorm) else ""
        return f"{site.kind} depends on the token" + gate
    if site.facts.gain_last and len(site.facts.shape) == 1:
        return "has neither gain nor shift"
    return f"does not end with a gain and a shift of {site.width} features ({site.kind}, {type(site.module).__name__})"


def _nothing_to_fold(sites: Sites, kept: list[tuple[str, str]], mode: Mode) -> str:
    gates = [float(site.module.gate) for site in sites if isinstance(site.module, TaperedNorm)]
    if any(gates) and mode == "full":
        return (
            f"the taper is not complete: the gate is {max(gates):.3g}, {100 * (1 - max(gates)):.0f} % of the way to 0; "
            "train to the end of the schedule, then fold"
        )
    if not kept:
        return f"nothing to fold: {NONE_FOUND}"
    why = "no norm is linear" if mode == "full" else "no gain or shift can be moved"
    hint = "; mode='affine' moves gains and shifts only" if mode == "full" else ""
    return f"nothing to fold, {why}{hint}:\n" + text_table(("site", "why"), kept)


def _untie(model: nn.Module, plan: list[_Step], undo: Undo) -> dict[str, str]:
    """Give readers that share their weight with another module their own copy; module → name of its weight."""
    tied = dict.fromkeys(name for step in plan if step.forward for name in step.site.untie)
    for name in tied:
        linear = model.get_submodule(name)
        # The bias as well: the setting that ties BERT's decoder to the embeddings ties its bias to another name.
        for key, shared in list(linear.named_parameters(recurse=False)):
            undo.assign(linear, key, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
    if tied:
        _tell_config(model, list(tied), undo)
    return {name: f"{name}.weight" for name in tied}


def _tell_config(model: nn.Module, untied: Sequence[str], undo: Undo) -> None:
    """Keep the configuration true: the head is no longer tied to the embeddings."""
    for holder, heads in _holders(model, untied):
        for config in _configs(holder):
            if getattr(config, "tie_word_embeddings", False):
                undo.assign(config, "tie_word_embeddings", False)
        keys = getattr(holder, "all_tied_weights_keys", None)
        if isinstance(keys, dict):
            undo.assign(holder, "all_tied_weights_keys", _others(keys, heads))


def _holders(model: nn.Module, heads: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
    """The model, and models inside it, that have a configuration and hold some of the heads, by their names in it."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        inside = [name.removeprefix(start) for name in heads if name.startswith(start)]
        if inside and getattr(module, "config", None) is not None:
            yield module, inside


def _configs(holder: Any) -> list[Any]:
    config = holder.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [config] if text is config else [config, text]


def _others(keys: Mapping[str, str], heads: Sequence[str]) -> dict[str, str]:
    """Of the ties of a class (name → the one it shares), those that are of none of the heads."""
    return {name: source for name, source in keys.items() if name.rpartition(".")[0] not in heads}


def _lost_ties(model: nn.Module, untie: Sequence[str]) -> list[str]:
    """Weights that the class would tie no longer where its configuration says that the head is its own.

    One setting is for all of them, so they would be left out of the file as copies and be missing when it is read.
    """
    lost: list[str] = []
    for holder, heads in _holders(model, untie):
        keys = getattr(holder, "all_tied_weights_keys", None)
        others = _others(keys, heads) if isinstance(keys, dict) else {}
        if others and hasattr(type(holder), "_from_config"):
            still = _tied_by_class(holder)
            lost += [name for name in others if name not in still]
    return lost


def _tied_by_class(model: Any) -> set[str]:
    """Names that share a parameter with another in a model of the class whose configuration file ties nothing."""
    config = copy.deepcopy(model.config)
    for each in _configs(SimpleNamespace(config=config)):
        each.tie_word_embeddings = False
    config = type(config).from_dict(config.to_dict())  # T5's ties all the same, but for what the file holds apart
    if config.tie_word_embeddings:
        return set(model.all_tied_weights_keys)
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            made = type(model)._from_config(config)
    except Exception:  # whatever a class raises that cannot be made so; then nothing is known to stay tied
        return set()
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in made.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return {name for shared in names.values() if len(shared) > 1 for name in shared}


def _apply(model: nn.Module, step: _Step, mode: Mode, undo: Undo, untied: dict[str, str]) -> None:
    site = step.site
    if step.forward:
        for reader in site.consumers:
            if reader.module in untied:
                bias = f"{reader.module}.bias" if reader.bias else None
                reader = replace(reader, weight=untied[reader.module], bias=bias)
            into_reader(model, reader, step.form, undo)
    elif site.producer is not None:
        into_producer(model, site.producer, step.form, undo)
    if mode == "full":
        _remove(model, site, undo)
        return
    facts = site.facts
    if facts.weight is not None:
        weight = getattr(site.module, facts.weight)
        undo.copy(weight, torch.full_like(weight, 1.0 - facts.offset))
    if facts.bias is not None:
        bias = getattr(site.module, facts.bias)
        undo.copy(bias, torch.zeros_like(bias))


def _remove(model: nn.Module, site: Site, undo: Undo) -> None:
    for name in site.names:
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        undo.add(lambda owner=owner, leaf=leaf: setattr(owner, leaf, site.module))
    replace_modules(model, dict.fromkeys(site.names))
