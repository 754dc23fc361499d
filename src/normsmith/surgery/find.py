"""List the places in a model where a norm stands, what each one is for, and who reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from normsmith.errors import InputError
from normsmith.norms import Norm
from normsmith.surgery.example import run_example
from normsmith.surgery.probe import NormFacts, norm_facts
from normsmith.surgery.table import text_table
from normsmith.surgery.trace import STREAM, trace
from normsmith.surgery.uses import Reader, Trace, Use

NONE_FOUND = "no norm of a known kind was found (normsmith's own, nn.LayerNorm, nn.RMSNorm, or what computes the same)"
_OPERATIONS = {"another norm", "a product with activations or a computed weight"}


@dataclass(frozen=True)
class Site:
    """One place in one model where a norm stands.

    `role` is `pre` (only linear layers read it), `final` (the model's output head reads it, or a model without head
    returns it), `post` (linear layers and the residual stream read it), `sandwich` (on a sublayer's output, before it
    joins the stream), `qk` (on queries or keys), `embedding` (on the embeddings, before the first sublayer) or `other`.
    `blocked` says why gain and shift cannot be absorbed by the readers, and is empty if they can. `producer` is the
    linear layer whose output the norm alone reads, if there is one. `untie` lists the readers that share their weight
    with another module, for instance an output head tied to the embeddings.
    """

    name: str
    module: nn.Module
    facts: NormFacts
    role: str
    consumers: tuple[Reader, ...]
    blocked: str
    producer: Reader | None = None
    untie: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """`layernorm` or `rmsnorm` for what computes one, the registry name of another normsmith norm, or `other`."""
        return self.facts.kind

    @property
    def width(self) -> int:
        """Number of features that are normalised together."""
        return self.facts.width

    @property
    def readers(self) -> tuple[str, ...]:
        """The names of the modules that read it in a product with a weight."""
        return tuple(dict.fromkeys(reader.module for reader in self.consumers))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the module, as JSON types."""
        facts = self.facts
        return {
            "name": self.name,
            "names": list(self.names),
            "class": type(self.module).__name__,
            "kind": self.kind,
            "role": self.role,
            "width": self.width,
            "eps": facts.eps,
            "eps_position": facts.eps_position,
            "gain": None if facts.weight is None else "1 + w" if facts.offset else "w",
            "cast_first": facts.cast_first,
            "readers": list(self.readers),
            "foldable": not self.blocked,
            "blocked": self.blocked,
        }


class Sites(tuple[Site, ...]):
    """The sites of a model in the order of its modules; prints as a table.

    `unseen` names modules with weights that did not run on the example: what they read is not known.
    """

    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self:
            return NONE_FOUND
        rows = [_row(site) for site in self]
        return text_table(("site", "kind", "role", "width", "eps", "gain", "read by", "foldable"), rows)


def _row(site: Site) -> tuple[str, ...]:
    info = site.to_dict()
    eps = "–" if site.facts.eps is None else f"{site.facts.eps:g}"
    eps += "" if site.facts.eps_position == "inside" else f" ({site.facts.eps_position})"
    readers = ", ".join(dict.fromkeys(reader.rpartition(".")[2] for reader in site.readers))
    return (site.name, site.kind, site.role, str(site.width), eps, info["gain"] or "–", readers, site.blocked or "yes")


@torch.inference_mode(False)
@torch.no_grad()
def find_norms(model: nn.Module, example: Any = None) -> Sites:
    """Find every norm of `model` and trace who reads it; nothing is changed.

    A norm is recognised by what it computes (see `normsmith.surgery.probe.norm_facts`), its readers by running the
    model once on an example and following the output through every operation that only rearranges it.

    Args:
        model: any module. On the meta device it runs without values, which shows the same structure as long as the
            code of the model asks for none.
        example: keyword arguments or an input for one forward pass; default: made from the model's config.

    Raises:
        InputError: `model` is no module, or the example cannot be made or run.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"find_norms takes a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # a compiled model is a wrapper around the one that is meant
    # A norm may be made of others, and what computes a weight (`spectral_norm`) may be called one: these are no sites.
    makers = [m for m in model.modules() if isinstance(m, Norm | ParametrizationList)]
    parts = {part for maker in makers for part in maker.modules() if part is not maker}
    named = [(name, module) for name, module in model.named_modules() if module not in parts]
    facts = {name: f for name, module in named if (f := norm_facts(module)) is not None}
    modules = {name: model.get_submodule(name) for name in facts}
    seen = trace(model, modules, lambda: _run(model, example))
    _complete(model, seen, modules)
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    widths = {n: f if f.shape else replace(f, shape=(seen.uses[n].width,)) for n, f in facts.items()}
    reads = _reads(seen)
    sites = Sites(
        _site(model, name, modules[name], widths[name], seen, reads, tuple(names[modules[name]])) for name in modules
    )
    sites.unseen = _unseen(model, seen)
    return sites


def _run(model: nn.Module, example: Any) -> Any:
    try:
        return run_example(model, example)
    except InputError:
        raise
    except Exception as error:  # whatever a model raises on an input that it does not take
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{type(model).__name__} does not run on the example ({type(error).__name__}: {reason}); pass an example= "
            "that it takes"
        ) from error


def _unseen(model: nn.Module, seen: Trace) -> tuple[str, ...]:
    used = {p.reader.weight for p in seen.products} | set(seen.reads)
    used |= {reader.weight for use in seen.uses.values() for reader in use.readers}
    found: list[str] = []
    for name, module in model.named_modules():
        weights = [f"{name}.{key}" for key, p in module.named_parameters(recurse=False) if p.ndim > 1]
        if weights and name not in seen.ran and not used.intersection(weights):
            found.append(name)
    return tuple(found)


def _site(
    model: nn.Module,
    name: str,
    module: nn.Module,
    facts: NormFacts,
    seen: Trace,
    reads: dict[str, list[_Read]],
    names: tuple[str, ...],
) -> Site:
    use = seen.uses[name]
    role = _role(use, seen)
    reasons = _reasons(use)
    untie: list[str] = []
    for reader in use.readers:
        others = [r for r in reads[reader.weight] if r.site != name and _overlap(r.bounds, reader.bounds)]
        if others and all(r.module != reader.module for r in others) and _tied(model, reader, others):
            untie.append(reader.module)
        elif others:
            reasons.append(f"{reader.module} reads other tensors too")
    if not use.runs:
        reasons = ["never ran on the example"]
    elif not use.readers and not reasons:
        reasons = ["no linear layer reads it"]
    producer = _producer(use, seen)
    blocked = "; ".join(dict.fromkeys(reasons))
    return Site(name, module, facts, role, tuple(use.readers), blocked, producer, tuple(dict.fromkeys(untie)), names)


def _tied(model: nn.Module, reader: Reader, others: list[_Read]) -> bool:
    """Whether every module that reads the weight holds it itself, so that one of them can be given a copy."""
    weight = model.get_parameter(reader.weight)
    owners = [model.get_submodule(name) for name in (reader.module, *(r.module for r in others))]
    return getattr(owners[0], "weight", None) is weight and all(
        any(p is weight for p in owner.parameters(recurse=False)) for owner in owners
    )


def _reasons(use: Use) -> list[str]:
    words = [reason for reason in dict.fromkeys(use.others) if " " in reason and reason not in _OPERATIONS]
    operations = [reason for reason in dict.fromkeys(use.others) if reason not in words]
    if not operations:
        return words
    listed = ", ".join(operations)
    among = use.readers or words or "another norm" in operations
    return [*words, f"also read by {listed}" if among else f"no linear layer reads it, but {listed}"]


def _role(use: Use, seen: Trace) -> str:
    residual = STREAM in use.others
    if any(reader.module in seen.heads for reader in use.readers) or (use.is_output and not residual):
        return "final"
    if use.products_before == 0 and use.others:
        return "embedding"
    if use.from_product and not use.readers:
        return "sandwich" if residual else "qk" if use.others else "other"
    if residual or (use.products_before and "another norm" in use.others and not use.from_product):
        return "post" if use.readers or use.products_before else "other"
    return "pre" if use.readers and not use.others else "other"


def _producer(use: Use, seen: Trace) -> Reader | None:
    product = use.producer
    if product is None or product.others or use.runs != 1 or product.reader.weight in seen.reads:
        return None
    return product.reader if sum(p.reader.weight == product.reader.weight for p in seen.products) == 1 else None


@dataclass(frozen=True)
class _Read:
    site: str | None
    module: str
    bounds: tuple[tuple[int, int], ...] | None  # None: all of it


def _reads(seen: Trace) -> dict[str, list[_Read]]:
    found: dict[str, list[_Read]] = defaultdict(list)
    for product in seen.products:
        found[product.reader.weight].append(_Read(product.site, product.reader.module, product.reader.bounds))
    for weight, places in seen.reads.items():
        found[weight] += [_Read(None, module, None) for module, _ in places]
    return found


def _overlap(a: tuple[tuple[int, int], ...] | None, b: tuple[tuple[int, int], ...] | None) -> bool:
    if a is None or b is None:
        return True
    return all(
        start < other_stop and other_start < stop for (start, stop), (other_start, other_stop) in zip(a, b, strict=True)
    )


def _complete(model: nn.Module, seen: Trace, sites: Iterable[str]) -> None:
    """Add experts that the router did not choose on the example: they would read what their siblings read."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    for use in seen.uses.values():
        new: dict[Reader, None] = {}
        for reader in use.readers:
            size = parameters[reader.weight].shape[0]
            if parameters[reader.weight].ndim == 3 and reader.axis != 0:
                reader = replace(reader, bounds=((0, size), *reader.bounds[1:]))
            new[reader] = None
            for twin in _idle_siblings(reader.module, modules, seen.ran, sites):
                weight = reader.weight.replace(reader.module, twin, 1)
                bias = reader.bias and reader.bias.replace(reader.module, twin, 1)
                if weight in parameters and parameters[weight].shape == parameters[reader.weight].shape:
                    new[replace(reader, module=twin, weight=weight, bias=bias)] = None
                elif isinstance(modules[twin.rpartition(".")[0]], nn.ModuleDict):  # another adapter of PEFT's
                    use.others.append(f"{twin}, which did not run and has another shape")
        use.readers = list(new)


def _idle_siblings(name: str, modules: dict[str, nn.Module], ran: set[str], sites: Iterable[str]) -> list[str]:
    parts = name.split(".")
    found: list[str] = []
    for i, part in enumerate(parts):
        stack = ".".join(parts[:i])
        holder = modules.get(stack)
        # Experts of a list, or adapters of a dictionary, of which a run uses some.
        if not (isinstance(holder, nn.ModuleList) and part.isdigit()) and not isinstance(holder, nn.ModuleDict):
            continue
        for other in holder._modules:  # pyright: ignore[reportPrivateUsage]
            member = f"{stack}.{other}"
            twin = ".".join([member, *parts[i + 1 :]])
            runs = any(r == member or r.startswith(member + ".") for r in ran)
            if not runs and twin in modules and not any(s.startswith(member + ".") for s in sites):
                found.append(twin)
    return found
