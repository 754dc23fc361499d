"""Replace the norms of a model in place, all of them or none, and put them back."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.norms import Norm, NormConfig, norm_config, norms
from normsmith.norms.base import shared_options
from normsmith.norms.layernorm import LayerNorm, LayerNormConfig
from normsmith.norms.padding import check_pooling, pools_sequence, refuse_pooling, watch_padding
from normsmith.norms.rmsnorm import RMSNorm, RMSNormConfig
from normsmith.registry import parse_spec
from normsmith.surgery.causal import hides_later_tokens
from normsmith.surgery.example import run_example
from normsmith.surgery.find import Site, find_norms
from normsmith.surgery.native import keep_changes
from normsmith.surgery.replace import attempted, carry_hooks, refuse_wrapped, replace_modules
from normsmith.surgery.select import Where, select_sites
from normsmith.surgery.table import text_table

_EXACT = 1e-5
_Place = tuple[torch.device, torch.dtype] | None
_SMALLEST_EPS = 1e-30  # the square of no float32 activation that matters; an all-zero token stays finite


@dataclass(frozen=True)
class SwapReport:
    """What `swap_norms_` did: (site, old class, new kind, deviation) of the swapped, (site, reason) of the others.

    `deviation` is ‖new(x) − old(x)‖ / ‖old(x)‖ over the tokens of the example, None if the model cannot be run (meta).
    """

    swapped: tuple[tuple[str, str, str, float | None], ...]
    kept: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        rows = [(name, f"{old} → {new}", _deviation(value)) for name, old, new, value in self.swapped]
        rows += [(name, f"kept: {why}", "") for name, why in self.kept]
        return text_table(("site", "result", "difference of its output"), rows)


@dataclass(frozen=True)
class RestoreReport:
    """What `restore_` did: (site, class that was swapped in, class that is back) for every site that was put back."""

    restored: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        return text_table(("site", "result"), [(name, f"{new} → {old}") for name, new, old in self.restored])


def _deviation(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1e}" + (" (the same function)" if value <= _EXACT else "")


@dataclass
class _Record:
    """A swap that can be undone: the old modules, the values their tensors had, and where the new ones were put."""

    modules: dict[str, nn.Module]
    values: list[tuple[Tensor, Tensor]]
    placed: dict[str, _Place]


_history: weakref.WeakKeyDictionary[nn.Module, list[_Record]] = weakref.WeakKeyDictionary()


@torch.inference_mode(False)  # parameters made in inference mode could never be trained
@torch.no_grad()
def swap_norms_(
    model: nn.Module,
    norm: str | dict[str, Any] | NormConfig,
    *,
    where: Where = None,
    init: Literal["match", "fresh"] = "match",
    example: Any = None,
) -> SwapReport:
    """Replace norms by another kind, in place; `restore_` takes it back.

    With `init="match"` a new norm starts from the trained one: it takes over gain, shift and eps (1 + w becomes w), as
    the same parameters where they mean the same, so that an optimiser made before goes on training them, and what it
    has of its own is fitted to the old outputs on the example. RMSNorm and LayerNorm modules of any family are taken
    over exactly by `rmsnorm` and `layernorm`. Device, dtype, train or eval mode, `requires_grad` and hooks are kept.

    Args:
        model: any model whose norms `find_norms` sees; the whole one, not a part: only what is passed here (and the
            models inside it) knows of the change when it is saved.
        norm: name or configuration of the new norm; options that are not given come from the old one.
        where: sites, as in `select_sites`; default all.
        init: `match`, or `fresh` for the new norm's own initial values.
        example: input for one forward pass, as in `find_norms`.

    Raises:
        InputError: an unknown norm, no such site, a site whose weights are not there (meta device, offloaded), a model
            that does not run with the new norms, or one inside DistributedDataParallel.
    """
    if init not in ("match", "fresh"):
        raise InputError(f"swap_norms_ init must be 'match' or 'fresh', got {init!r}")
    model = getattr(model, "_orig_mod", model)
    norm = parse_spec(norm) if isinstance(norm, str) else norm
    target = norm_config(norm)
    check_pooling(model, target)
    given = set(norm) if isinstance(norm, dict) else target.model_fields_set if isinstance(norm, NormConfig) else set()
    refuse_wrapped(model)
    sites = find_norms(model, example)
    if pools_sequence(target) and hides_later_tokens(model, lambda e: _inputs(model, sites, e), example):
        refuse_pooling(target, type(model).__name__)
    chosen = select_sites(sites, where)
    seen, unusual = _record_inputs(model, chosen, example)
    new: dict[str, nn.Module] = {}
    swapped: list[tuple[str, str, str, float | None]] = []
    kept: list[tuple[str, str]] = []
    options = {k: getattr(target, k) for k in cast("set[str]", given) if k != "kind"}
    saved = [(t, t.detach().clone()) for site in chosen for t in _tensors(site.module)]
    try:
        for site in chosen:
            reason = unusual.get(site.name) or _cannot(site, target, options, site.name in seen)
            if reason:
                kept.append((site.name, reason))
                continue
            module, deviation = _successor(site, target, options, init), None
            if site.name in seen:
                x, y = seen[site.name]
                if init == "match":
                    module.match(x, y)
                deviation = _difference(module, x, y)
            new |= dict.fromkeys(site.names, module)
            swapped.append((site.name, type(site.module).__name__, target.kind, deviation))
    except BaseException:
        _write_back(saved)  # `match` may have fitted parameters that the new norm shares with the old one
        raise
    if new:
        old = {name: model.get_submodule(name) for name in new}
        try:
            with attempted(model, new, example):
                pass
        except BaseException:
            _write_back(saved)
            raise
        watch_padding(model)
        keep_changes(model)
        remember(model, old, saved, new)
    return SwapReport(tuple(swapped), tuple(kept))


def remember(
    model: nn.Module, old: dict[str, nn.Module], values: list[tuple[Tensor, Tensor]], new: Mapping[str, nn.Module]
) -> None:
    """Let `restore_` put the `old` modules back where `new` ones stand now, with the values their tensors had."""
    _history.setdefault(model, []).append(_Record(old, values, {name: _place(module) for name, module in new.items()}))


def forget_swaps(model: nn.Module) -> None:
    """No swap of this model, or of one that holds it or is part of it, can be taken back any more.

    It was folded, or its norms were replaced once more by a schedule, which would be lost with the swap unseen.
    """
    parts = set(model.modules())
    for owner in list(_history):
        if owner in parts or model in set(owner.modules()):
            _history.pop(owner)


@torch.no_grad()
def _write_back(values: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in values:
        tensor.copy_(value)


def restore_(model: nn.Module) -> RestoreReport:
    """Undo the last `swap_norms_` of this model: the same module objects, with the values they had. In place.

    Raises:
        InputError: no swap of this model object is on record (a copy or a reloaded model has none).
    """
    model = getattr(model, "_orig_mod", model)
    records = _history.get(model)
    if not records:
        raise InputError(
            "nothing to restore: swap_norms_ has not changed this model object, or it was restored already, or tapered "
            "or folded since"
        )
    record = records.pop()
    now = {name: model.get_submodule(name) for name in record.modules}
    _write_back(record.values)
    for name, old in record.modules.items():
        _follow(record.placed[name], _place(now[name]), old)
        old.train(now[name].training)  # it has missed every train() and eval() since
    replace_modules(model, record.modules)
    watch_padding(model)
    restored = ((name, type(now[name]).__name__, type(old).__name__) for name, old in record.modules.items())
    return RestoreReport(tuple(restored))


def _place(module: nn.Module) -> _Place:
    return next(((p.device, p.dtype) for p in module.parameters()), None)


def _follow(before: _Place, now: _Place, old: nn.Module) -> None:
    """Move `old`, which was not part of the model meanwhile, as the norm that stood in for it was moved since."""
    if before is not None and now is not None and before != now:
        old.to(device=now[0], dtype=None if now[1] == before[1] else now[1])


def plain_norm(site: Site, nearest: bool = False) -> Norm:
    """The site's norm as one of normsmith's own that computes the same, with the same parameters where they mean it.

    With `nearest`, an eps that is 0 or stands elsewhere than in the root is replaced by that which comes closest, and
    an RMSNorm that adds a shift hands it on to a norm that has one.

    Raises:
        InputError: it is neither a normsmith norm nor a LayerNorm or RMSNorm in the usual form.
    """
    module, facts = site.module, site.facts
    if isinstance(module, Norm):
        return module
    usual = facts.plain and bool(facts.eps)
    if len(facts.shape) != 1 or not (usual or (nearest and facts.kind in ("layernorm", "rmsnorm"))):
        raise InputError(f"{site.name}: {type(module).__name__} is not a LayerNorm or RMSNorm in the usual form")
    if facts.kind == "rmsnorm" and facts.bias and not nearest:
        raise InputError(
            f"{site.name}: {type(module).__name__} is an RMSNorm that also adds {facts.bias}, which no norm here does; "
            "leave it out with where="
        )
    eps = facts.eps or 0.0
    eps = max(eps if facts.eps_position == "inside" else eps**2, _SMALLEST_EPS)
    affine, bias = facts.weight is not None, facts.bias is not None
    if facts.centred:
        new: Norm = LayerNorm(facts.width, LayerNormConfig(eps=eps, affine=affine or bias, bias=bias))
    else:
        new = RMSNorm(facts.width, RMSNormConfig(eps=eps, affine=affine, cast_first=facts.cast_first))
    device = next((t.device for t in _tensors(module)), None)
    new.to(device=device)
    for name, theirs in (("gamma", facts.weight), ("beta", facts.bias)):
        if theirs is not None:
            setattr(new, name, _same_or_offset(getattr(module, theirs), facts.offset if name == "gamma" else 0.0))
    return new.train(module.training)


def _same_or_offset(parameter: nn.Parameter, offset: float) -> nn.Parameter:
    if not offset:
        return parameter
    # 1 + w in float32: bfloat16 would round a w of 2⁻⁸ away.
    return nn.Parameter(offset + parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32)),
                        requires_grad=parameter.requires_grad)  # fmt: skip


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _cannot(site: Site, target: NormConfig, given: dict[str, Any], ran: bool) -> str:
    module = site.module
    if any(t.is_meta for t in module.parameters()) and hasattr(module, "_hf_hook"):
        raise InputError(f"{site.name} is offloaded: load the model on a device to change its norms")
    if len(site.facts.shape) != 1 or not site.width:
        return f"normalises over {site.facts.shape or 'an unknown width'}, not over one axis"
    options = module.config.to_dict() if isinstance(module, Norm) else {}
    if options.get("kind") == target.kind and {**options, **given} == options:
        return f"already {target.kind}"
    if site.kind == "other" and not ran:
        return f"is neither LayerNorm nor RMSNorm ({type(module).__name__}), and without a run its input is unknown"
    return ""


def _successor(site: Site, target: NormConfig, given: dict[str, Any], init: str) -> Norm:
    cls = norms.get(target.kind)
    old, device = site.module, next((t.device for t in _tensors(site.module)), torch.device("cpu"))
    if init == "match" and (isinstance(old, Norm) or site.kind in ("layernorm", "rmsnorm")):
        source = plain_norm(site, nearest=True)
        # Only what is said: a norm made of others gives them their own share of the old one's options.
        shared = shared_options(cls, source).model_dump(mode="json", exclude_unset=True)
        options = {**shared, **given, "kind": target.kind}
        new: Norm = cls.from_site(source, site.width, cls.Config(**options))
    else:
        dtype = next((t.dtype for t in _tensors(old)), torch.get_default_dtype())
        new = cls(site.width, target).to(device=device, dtype=dtype)
    own = [p for p in new.parameters() if not any(p is q for q in old.parameters())]
    if any(True for _ in old.parameters()) and not any(p.requires_grad for p in old.parameters()):
        for parameter in own:
            parameter.requires_grad_(False)
    carry_hooks(old, new)
    return new.train(old.training)


def _record_inputs(
    model: nn.Module, sites: Sequence[Site], example: Any
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, str]]:
    """Input and output of every site on the example, detached, and sites that are called as no norm can be.

    Both are empty for a model without values.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    unusual: dict[str, str] = {}
    if any(p.is_meta for p in model.parameters()):
        return seen, unusual

    def hook_for(site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            reason = _unusual_call(site, args, kwargs, output)
            if reason:
                unusual[site.name] = reason
            else:
                seen[site.name] = (args[0].detach().clone(), output.detach().clone())

        return hook

    handles = [site.module.register_forward_hook(hook_for(site), with_kwargs=True) for site in sites]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            run_example(model.eval(), example)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return seen, unusual


def _inputs(model: nn.Module, sites: Sequence[Site], example: Any) -> dict[str, Tensor]:
    return {name: x for name, (x, _) in _record_inputs(model, sites, example)[0].items()}


def _unusual_call(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> str:
    """Why a norm of another kind could not be called as this one was, or an empty string."""
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        given = [*("a tensor" if isinstance(a, Tensor) else repr(a) for a in args), *(f"{k}=…" for k in kwargs)]
        return f"is called with ({', '.join(given)}), not with one tensor"
    if not isinstance(output, Tensor) or output.shape != args[0].shape:
        return "its output has not the shape of its input"
    if args[0].shape[-1] != site.width:
        return f"normalises over {site.width} entries of another axis than the last, which has {args[0].shape[-1]}"
    return ""


@torch.no_grad()
def _difference(module: Norm, x: Tensor, y: Tensor) -> float:
    training = module.training
    new = type(module).forward(module.eval(), x).double()  # not through the hooks that were carried over
    module.train(training)
    return float((new - y.double()).norm() / y.double().norm().clamp_min(1e-30))
