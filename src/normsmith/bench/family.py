"""The models whose decoding speeds are compared: with norms, tapered, folded, and one that never had them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from normsmith.errors import InputError
from normsmith.models import NormsmithForCausalLM
from normsmith.models.describe import describe
from normsmith.norms import Norm, norms
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig
from normsmith.surgery import find_norms, fold_, taper_
from normsmith.surgery.replace import replace_modules
from normsmith.traits import is_causal_lm

LABELS = {
    "baseline": "normalised baseline",
    "fused": "the same, norms fused by torch",
    "tapered": "tapered, not folded",
    "folded": "tapered and folded",
    "twin": "norm-free twin (the ceiling)",
}


def decode_family(model: Any, fused: bool = False) -> dict[str, nn.Module]:
    """The models that are compared: normalised baseline, tapered, folded, and the twin that never had norms.

    Speed does not depend on the weights, so one model is enough to make all of them. A model that was tapered to the
    end keeps its weights in `tapered` and `folded`; one with plain norms is tapered here with c = 1, for speed only.

    Args:
        model: a causal language model of normsmith or transformers, pre-norm, in evaluation mode.
        fused: also a baseline whose RMSNorms are `torch.nn.RMSNorm`, one fused call each. LayerNorms are fused already,
            so a model that has only those gets no such row.

    Raises:
        InputError: no causal language model, no norm that can be tapered, or a taper that is not at its end.
    """
    if not is_causal_lm(model):
        raise InputError(f"{type(model).__name__} is no causal language model, so it decodes nothing")
    own = isinstance(model, NormsmithForCausalLM)
    tapered = copy.deepcopy(model).eval()
    if not any(isinstance(m, TaperedNorm) for m in tapered.modules()):
        controller = taper_(tapered, TaperConfig(placement="internal", scale_loss=0), steps=100)
        controller.close()
        for norm in controller.sites.values():
            norm.gate.zero_()
            norm.gate_eval.zero_()
    folded = copy.deepcopy(tapered)
    if own:
        describe(tapered)
    report = fold_(folded)
    if own:
        describe(folded)
        plain = {k: _plain(v) for k, v in (("norm", tapered.config.norm), ("final_norm", tapered.config.final_norm))}
        baseline, twin = _build(tapered, norm_overrides=None, **plain), _build(folded)
    else:
        baseline = _without_tapers(model)
        twin = copy.deepcopy(baseline)
        replace_modules(twin, dict.fromkeys(report.removed))
    family: dict[str, nn.Module] = {"baseline": baseline}
    if fused and (quick := with_fused_norms(baseline)) is not None:
        family["fused"] = quick
    device = next(model.parameters()).device  # models that were built anew are on the CPU
    return {name: m.to(device) for name, m in {**family, "tapered": tapered, "folded": folded, "twin": twin}.items()}


def with_fused_norms(model: Any) -> nn.Module | None:
    """A copy whose RMSNorms are `torch.nn.RMSNorm` with the same gains; None if the model has none."""
    quick = copy.deepcopy(model).eval()
    new: dict[str, nn.Module | None] = {}
    for site in find_norms(quick):
        facts = site.facts
        if site.kind != "rmsnorm" or not facts.plain or len(facts.shape) != 1:
            continue
        module = nn.RMSNorm(facts.width, eps=facts.eps, elementwise_affine=facts.weight is not None)
        if facts.weight is not None:
            module.weight = nn.Parameter(getattr(site.module, facts.weight).detach() + facts.offset)
        new |= dict.fromkeys(site.names, module)
    replace_modules(quick, new)
    return quick if new else None


def _without_tapers(model: Any) -> Any:
    """The model with the plain norms that its tapered ones stand for, or as it is."""
    plain = copy.deepcopy(model).eval()
    new: dict[str, nn.Module | None] = {}
    for name, module in plain.named_modules():
        if isinstance(module, TaperedNorm):
            cls: type[Norm] = norms.get(module.config.kind.removeprefix("tapered_"))
            new[name] = cls.from_site(module, module.width)
    replace_modules(plain, new)
    return plain


def _plain(norm: Any) -> dict[str, Any]:
    return {**norm, "kind": str(norm["kind"]).removeprefix("tapered_")}


def _build(like: NormsmithForCausalLM, **changes: Any) -> NormsmithForCausalLM:
    config = copy.deepcopy(like.config)
    for name, value in changes.items():
        setattr(config, name, value)
    parameter = next(like.parameters())
    built = NormsmithForCausalLM(config).eval()
    nn.Module.to(built, device=parameter.device, dtype=parameter.dtype)
    return built
