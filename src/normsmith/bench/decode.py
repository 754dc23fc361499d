"""Decoding speed with a KV cache: what tapering and folding are worth at inference."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from normsmith.bench.timing import Timing, interleave, synchronize
from normsmith.errors import InputError, VerificationError
from normsmith.models import NormsmithForCausalLM
from normsmith.models.describe import describe
from normsmith.norms.tapered import TaperedNorm
from normsmith.schedules import TaperConfig
from normsmith.surgery import fold_, taper_


@dataclass(frozen=True)
class DecodeSpeed:
    """Tokens per second of one model: median and quartiles over rounds; ratio of its median to the first one."""

    name: str
    median: float
    low: float
    high: float
    ratio: float


LABELS = {
    "baseline": "normalised baseline",
    "tapered": "tapered, not folded",
    "folded": "tapered and folded",
    "twin": "norm-free twin (the ceiling)",
}


def decode_family(model: NormsmithForCausalLM) -> dict[str, nn.Module]:
    """The models that are compared: normalised baseline, tapered, folded, and the twin that never had norms.

    Speed does not depend on the weights, so one model is enough to make all four. A model that was tapered to the end
    keeps its weights in `tapered` and `folded`; one that has plain norms is tapered here with c = 1, for speed only.
    """
    tapered = copy.deepcopy(model).eval()
    sites = [m for m in tapered.modules() if isinstance(m, TaperedNorm)]
    if not sites:
        controller = taper_(tapered, TaperConfig(placement="internal", scale_loss=0), steps=100)
        controller.close()
        sites = list(controller.sites.values())
        for norm in sites:
            norm.gate.zero_()
            norm.gate_eval.zero_()
    describe(tapered)
    folded = copy.deepcopy(tapered)
    fold_(folded)
    describe(folded)
    plain = {k: _plain(v) for k, v in (("norm", tapered.config.norm), ("final_norm", tapered.config.final_norm))}
    baseline = _build(tapered, norm_overrides=None, **plain)
    twin = _build(folded)
    return {"baseline": baseline, "tapered": tapered, "folded": folded, "twin": twin}


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


@torch.no_grad()
def greedy_decode(model: nn.Module, prompt: Tensor, new_tokens: int) -> tuple[Tensor, float]:
    """Greedy continuation of `prompt` (batch, time) with a dynamic KV cache: (tokens, seconds without the prefill)."""
    config: Any = model.config
    cache = DynamicCache(config=config)
    token = model(input_ids=prompt, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
    tokens = [token]
    synchronize()
    started = time.perf_counter()
    for _ in range(new_tokens - 1):
        token = model(input_ids=token, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        tokens.append(token)
    synchronize()
    return torch.cat(tokens, dim=1), time.perf_counter() - started


def bench_decode(
    models: Mapping[str, nn.Module],
    prompt: Tensor,
    new_tokens: int = 64,
    rounds: int = 9,
    warmup: int = 2,
    must_agree: tuple[str, str] = ("tapered", "folded"),
    tick: Callable[[int], None] | None = None,
) -> list[DecodeSpeed]:
    """Measure the models in interleaved rounds; the first one is the reference of the ratios.

    Raises:
        VerificationError: the two models named in `must_agree` generate different tokens; a speed-up that changes the
            output is none, so nothing is measured.
    """
    if new_tokens < 2:
        raise InputError(f"decoding {new_tokens} token(s) cannot be timed: ask for at least 2")
    if all(name in models for name in must_agree):
        check_agreement(models[must_agree[0]], models[must_agree[1]], prompt, new_tokens, must_agree)

    def case(model: nn.Module) -> Callable[[], float]:
        return lambda: greedy_decode(model, prompt, new_tokens)[1]

    timings = interleave({name: case(model) for name, model in models.items()}, rounds, warmup, tick)
    produced = prompt.shape[0] * (new_tokens - 1)
    reference = next(iter(timings.values()))

    def speed(name: str, timing: Timing) -> DecodeSpeed:
        fast, slow = timing.quartiles
        ratio = reference.median / timing.median
        return DecodeSpeed(name, produced / timing.median, produced / slow, produced / fast, ratio)

    return [speed(name, timing) for name, timing in timings.items()]


@torch.no_grad()
def check_agreement(
    one: nn.Module, other: nn.Module, prompt: Tensor, new_tokens: int, names: tuple[str, str], tolerance: float = 1e-4
) -> None:
    """Make sure that two models generate the same tokens; a tie within rounding may be broken either way.

    Raises:
        VerificationError: with the position and how far the two models' logits lie apart there.
    """
    first, second = (greedy_decode(model, prompt, new_tokens)[0] for model in (one, other))
    different = (first != second).any(0)
    if not different.any():
        return
    position = int(different.nonzero()[0])
    read = torch.cat((prompt, first[:, :position]), dim=1)
    logits = [cast("Tensor", model(input_ids=read, logits_to_keep=1).logits)[:, -1].double() for model in (one, other)]
    apart = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
    if not apart <= tolerance:  # logits that are not numbers agree with nothing
        raise VerificationError(
            f"{names[0]} and {names[1]} generate different tokens from position {position} on (their logits differ by "
            f"{apart:.1e} relative): no speed is reported for models that do not compute the same"
        )
