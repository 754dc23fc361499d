"""What surgery does to each family, done once per test session: the tests judge it, docs/families.md shows it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.norms import Norm
from normsmith.norms.tapered import TaperedNorm
from normsmith.surgery import FoldReport, Site, Sites, SwapReport, find_norms, fold_, restore_, swap_norms_, taper_
from normsmith.surgery.uses import Reader
from normsmith.surgery.verify import difference, outputs
from tests.surgery.families import FAMILIES
from tests.surgery.family import Family

TRACED, OTHER = 0, 7  # seeds of the example that is traced and of the one that is compared


@dataclass(frozen=True)
class Change:
    """A transform of one family: its report, or why it was refused, and what was measured."""

    report: FoldReport | None
    refused: str = ""
    error: float = 0.0
    new_biases: tuple[str, ...] = ()  # readers and producers that had none
    unchanged: tuple[str, ...] = ()  # readers whose weight is what it was, gains that are not the identity
    embeddings_kept: bool = True
    config_true: bool = True  # it says that the head is tied exactly if it is
    linear: tuple[str, ...] = ()  # linear norms that remain


@cache
def found(name: str) -> Sites:
    """The sites; their modules belong to a model of their own."""
    return _find(FAMILIES[name], FAMILIES[name].model())


@cache
def swapped(name: str) -> tuple[SwapReport, float, bool]:
    """Every norm to the plain one of its kind: report, difference of the outputs, and whether restoring is exact."""
    family = FAMILIES[name]
    model = family.model()
    modules, state = dict(model.named_modules()), _state(model)
    before = outputs(model, family.inputs(model, OTHER))
    report = swap_norms_(model, family.kind, example=_traced(family, model))
    change = difference(before, outputs(model, family.inputs(model, OTHER)))
    if report.swapped:
        restore_(model)
    same = dict(model.named_modules()) == modules and _equal(_state(model), state)
    return report, change, same and difference(before, outputs(model, family.inputs(model, OTHER))) == 0


@cache
def affine(name: str) -> Change:
    """Gains and shifts absorbed, in float32, against a float64 copy of the model before."""
    return _fold(FAMILIES[name], FAMILIES[name].model(), "affine")


@cache
def full(name: str) -> Change:
    """Every norm of an ordinary form made linear and folded, in float64."""
    family = FAMILIES[name]
    model = double(family.model().train())
    example = _traced(family, model)
    sites = _find(family, model)
    if any(site.role == "pre" for site in sites):
        taper_(model, {"scale_loss": 0.0}, steps=10, example=example).close()
    rest = [s.name for s in sites if s.role != "pre" and len(s.facts.shape) == 1]
    if rest:
        swap_norms_(model, f"tapered_{family.kind}", where=rest, example=example)
    generator = torch.Generator().manual_seed(5)
    for norm in (m for m in model.modules() if isinstance(m, TaperedNorm)):
        norm.gate.fill_(0)
        norm.gate_eval.fill_(0)
        norm.scale.fill_(0.7)
        with torch.no_grad():
            norm.gamma_tilde.copy_(0.6 * torch.randn(norm.width, generator=generator) + 0.2)
    return _fold(family, model.eval(), "full")


def reloaded(name: str, folder: Path) -> tuple[float, bool, tuple[str, ...]]:
    """Fold what needs no bias that the class would not load, save, load in the stock class.

    Returns the difference of the outputs, whether the embeddings' bits are kept, and the names of missing and
    unexpected parameters.
    """
    family = FAMILIES[name]
    model: Any = family.model()
    fold_(model, "affine", where=lambda site: _stays_stock(family, reader_leaves(site)))
    embeddings = {n: t.clone() for n, t in model.state_dict().items() if "embed" in n}
    before = outputs(model, family.inputs(model, OTHER))
    model.save_pretrained(folder)
    again, info = type(model).from_pretrained(folder, output_loading_info=True)
    problems = tuple(str(k) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") for k in info[key])
    kept = _equal(embeddings, {n: t for n, t in again.state_dict().items() if "embed" in n})
    return difference(before, outputs(again, family.inputs(again, OTHER))), kept, problems


def can_reload(name: str) -> bool:
    """Whether the family is saved by transformers and has a site that can be absorbed without a bias it cannot load."""
    family = FAMILIES[name]
    absorbed = [at for at in family.sites if at.plain and not at.blocked and family.formula != "n"]
    return family.example is None and any(_stays_stock(family, set(at.readers.split())) for at in absorbed)


def double(model: nn.Module) -> nn.Module:
    """The model in float64."""
    if hasattr(getattr(model, "config", None), "_experts_implementation"):
        model.set_experts_implementation("eager")  # pyright: ignore (the grouped product knows no float64)
    return model.double()


def reader_leaves(site: Site) -> set[str]:
    """The last parts of the readers' names."""
    return {reader.rpartition(".")[2] for reader in site.readers}


def _stays_stock(family: Family, readers: set[str]) -> bool:
    return family.reloads or not readers & set(family.new_biases.split())


def _traced(family: Family, model: nn.Module) -> Any:
    return None if family.example is None else family.inputs(model, TRACED)


def _find(family: Family, model: nn.Module) -> Sites:
    return find_norms(model, _traced(family, model))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def _fold(family: Family, model: nn.Module, mode: Any) -> Change:
    twin = double(copy.deepcopy(model))
    exact = outputs(twin, family.inputs(twin, OTHER))
    sites = {site.name: site for site in _find(family, model)}
    parameters = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
    embeddings = _embeddings(model)
    bits = None if embeddings is None else embeddings.detach().clone()
    try:
        report = fold_(model, mode, example=_traced(family, model))
    except InputError as error:
        return Change(None, str(error))
    absorbed = [sites[n] for n in (*report.absorbed, *report.removed)]
    named = dict(model.named_parameters(remove_duplicate=False))
    unchanged = [r.weight for s in absorbed for r in _targets(s) if _same(model, s, r, parameters)]
    unchanged += [s.name for s in absorbed if mode == "affine" and not _is_identity(s, model)]
    biases = {n.split(".")[-2] for n in named if n.endswith(".bias") and n not in parameters}
    linear = [n for n, m in model.named_modules() if isinstance(m, Norm) and m.linear_form() is not None]
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # as transformers does on its own now and then: what was untied must stay so
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    twin = double(copy.deepcopy(model))
    return Change(
        report,
        error=difference(exact, outputs(twin, family.inputs(twin, OTHER))),
        new_biases=tuple(sorted(biases)),
        unchanged=tuple(unchanged),
        embeddings_kept=bits is None or torch.equal(bits, _embeddings(model)),  # pyright: ignore
        config_true=not (tied and report.untied),
        linear=tuple(linear),
    )


def _targets(site: Site) -> tuple[Reader, ...]:
    return (site.producer,) if site.blocked and site.producer else site.consumers


def _same(model: nn.Module, site: Site, reader: Reader, before: dict[str, Tensor]) -> bool:
    region = tuple(slice(*b) for b in reader.bounds)
    name = f"{reader.module}.weight" if reader.module in site.untie else reader.weight
    return torch.equal(model.get_parameter(name)[region], before[reader.weight][region])


def _is_identity(site: Site, model: nn.Module) -> bool:
    module = model.get_submodule(site.name)
    scale, shift = site.facts.scale(module), site.facts.shift(module)
    return (scale is None or bool((scale == 1).all())) and (shift is None or not bool(shift.any()))


def _embeddings(model: Any) -> Tensor | None:
    try:
        return model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
