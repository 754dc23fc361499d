"""Decoding speed: what tapering and folding are worth at inference."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, StaticCache

from normsmith.bench.timing import Timing, compiling, interleave, synchronize
from normsmith.errors import InputError, VerificationError
from normsmith.surgery.example import placed

_PASSES = 20  # over the prompt in one timing without a cache: one pass of a small model is shorter than a hiccup
CacheKind = Literal["dynamic", "static", "none"]


@dataclass(frozen=True)
class DecodeSpeed:
    """Tokens per second of one model: median and quartiles over rounds.

    `ratio` is its speed relative to the first model's, the median over the rounds: a machine that slows down for some
    time does so for both. `seconds` are the rounds themselves.
    """

    name: str
    median: float
    low: float
    high: float
    ratio: float
    seconds: tuple[float, ...]

    def relative_to(self, other: DecodeSpeed) -> float:
        """Speed relative to another model measured in the same rounds."""
        return Timing(other.seconds).relative_to(Timing(self.seconds))


class Decoder:
    """Greedy continuation of one prompt (batch, time) by one model; calling it gives (tokens, seconds).

    Args:
        model: a causal language model of transformers' kind, in evaluation mode.
        prompt: token ids.
        new_tokens: how many to generate; the first comes from the prefill, which is not timed.
        cache: `dynamic` grows, `static` has its final size from the start (and is made once, for all calls), `none` is
            the other published protocol: forward passes over the prompt without a cache, last-token logits only; each
            counts as one token per sequence, and new_tokens does not count.
        compiled: compile the step; on CUDA with graphs.

    Raises:
        InputError: compiled with a cache that grows, which would compile anew at every length; a model that cannot read
            so many tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt: Tensor,
        new_tokens: int = 64,
        cache: CacheKind = "dynamic",
        compiled: bool = False,
    ) -> None:
        if cache not in ("dynamic", "static", "none"):
            raise InputError(f"cache {cache!r}: write dynamic, static or none")
        if compiled and cache == "dynamic":
            raise InputError("a cache that grows cannot be compiled: write cache static or none")
        if cache != "none" and new_tokens < 2:
            raise InputError(f"decoding {new_tokens} token(s) cannot be timed: ask for at least 2")
        self.model, self.prompt, self.new_tokens, self.cache = model, placed(model, prompt), new_tokens, cache
        graphs = "reduce-overhead" if self.prompt.is_cuda else "default"
        self.step: Callable[..., Any] = torch.compile(model, mode=graphs, dynamic=False) if compiled else model
        # Models without the argument give all logits; then that is what their users pay for.
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.options: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}
        self._static: StaticCache | None = None
        longest, needed = learned_positions(model), self.prompt.shape[1] + (0 if cache == "none" else new_tokens - 1)
        if longest is not None and needed > longest:
            raise InputError(
                f"{type(model).__name__} has {longest} learned positions, and prompt and new tokens need {needed}: "
                "shorten one of them"
            )

    @property
    def produced(self) -> int:
        """Tokens that the timed part of a call produces."""
        return self.prompt.shape[0] * (_PASSES if self.cache == "none" else self.new_tokens - 1)

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, float]:
        """Decode once: tokens (batch, new), seconds."""
        token = self.prompt[:, -1:]
        if self.cache == "none":
            synchronize()
            started = time.perf_counter()
            for _ in range(_PASSES):
                token = self._best(self.step(input_ids=self.prompt, use_cache=False, **self.options))
            synchronize()
            return token, time.perf_counter() - started
        cache = self._new_cache()
        token = self._best(self.model(input_ids=self.prompt, cache=cache, use_cache=True, **self.options))
        tokens = [token]
        synchronize()
        started = time.perf_counter()
        for _ in range(self.new_tokens - 1):
            token = self._best(self.step(input_ids=token, cache=cache, use_cache=True, **self.options))
            tokens.append(token)
        synchronize()
        return torch.cat(tokens, dim=1), time.perf_counter() - started

    def _best(self, output: Any) -> Tensor:
        return output.logits[:, -1:].argmax(-1)

    def _new_cache(self) -> Any:
        config = cast("Any", self.model.config)
        if self.cache == "dynamic":
            return DynamicCache(config=config)
        if self._static is None:
            self._static = StaticCache(config=config, max_cache_len=self.prompt.shape[1] + self.new_tokens)
        self._static.reset()
        return self._static


def learned_positions(model: nn.Module) -> int | None:
    """How many positions a model has in a table of them, where it has one; beyond, looking them up fails."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    rows = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not embed]
    # Some tables begin with a few rows for padding.
    return longest if isinstance(longest, int) and any(longest <= n <= longest + 8 for n in rows) else None


def greedy_decode(model: nn.Module, prompt: Tensor, new_tokens: int) -> tuple[Tensor, float]:
    """Greedy continuation of `prompt` (batch, time) with a dynamic KV cache: (tokens, seconds without the prefill)."""
    return Decoder(model, prompt, new_tokens)()


def bench_decode(
    models: Mapping[str, nn.Module],
    prompt: Tensor,
    new_tokens: int = 64,
    rounds: int = 9,
    warmup: int = 2,
    must_agree: tuple[str, str] = ("tapered", "folded"),
    tick: Callable[[int], None] | None = None,
    cache: CacheKind = "dynamic",
    compiled: bool = False,
) -> list[DecodeSpeed]:
    """Measure the models in interleaved rounds; the first one is the reference of the ratios.

    Arguments as in `Decoder`. Before anything is timed, the two models named in `must_agree` must generate the same
    tokens, and so must each model with this cache and compilation and the same model plainly.

    Raises:
        VerificationError: they generate different tokens; a speed-up that changes the output is none.
        InputError: see `Decoder`.
    """

    def case(decoder: Decoder) -> Callable[[], float]:
        return lambda: decoder()[1]

    with compiling(len(models)) if compiled else nullcontext():
        decoders = {name: Decoder(model, prompt, new_tokens, cache, compiled) for name, model in models.items()}
        if all(name in models for name in must_agree):
            check_agreement(models[must_agree[0]], models[must_agree[1]], prompt, new_tokens, must_agree)
        if cache == "static" or compiled:
            for name, decoder in decoders.items():
                count = 1 if cache == "none" else new_tokens
                plain = Decoder(models[name], prompt, max(count, 2), "dynamic")()[0][:, :count]
                how = f"{name} with {cache} cache{', compiled' if compiled else ''}"
                _compare(models[name], models[name], prompt, plain, decoder()[0], (name, how))

        timings = interleave({name: case(decoder) for name, decoder in decoders.items()}, rounds, warmup, tick)
    produced = next(iter(decoders.values())).produced
    reference = next(iter(timings.values()))

    def speed(name: str, timing: Timing) -> DecodeSpeed:
        fast, slow = timing.quartiles
        speeds = produced / timing.median, produced / slow, produced / fast
        return DecodeSpeed(name, *speeds, ratio=reference.relative_to(timing), seconds=timing.seconds)

    return [speed(name, timing) for name, timing in timings.items()]


def check_agreement(one: nn.Module, other: nn.Module, prompt: Tensor, new_tokens: int, names: tuple[str, str]) -> None:
    """Make sure that two models generate the same tokens; a tie within rounding may be broken either way.

    Rounding is 1e-4 of the largest logit, or eight units in the last place of the models' dtype if that is more.

    Raises:
        VerificationError: with the position and how far the two models' logits lie apart there.
    """
    first, second = (greedy_decode(model, prompt, max(new_tokens, 2))[0] for model in (one, other))
    _compare(one, other, prompt, first, second, names)


@torch.no_grad()
def _compare(
    one: nn.Module,
    other: nn.Module,
    prompt: Tensor,
    first: Tensor,
    second: Tensor,
    names: tuple[str, str],
) -> None:
    first, second, prompt = (placed(one, tokens) for tokens in (first, second, prompt))
    different = (first != second).any(0)
    if not different.any():
        return
    position = int(different.nonzero()[0])
    read = torch.cat((prompt, first[:, :position]), dim=1)
    rows = (first != second)[:, position]
    found = [cast("Tensor", model(input_ids=placed(model, read)).logits) for model in (one, other)]
    raw = [logits[:, -1].to(read.device)[rows] for logits in found]
    logits, tolerance = [r.double() for r in raw], max(1e-4, 8 * torch.finfo(raw[0].dtype).eps)
    scale = logits[0].abs().max()
    # Models may differ by rounding; one model run in two ways may do so only where its two best tokens all but tie.
    chosen = [logits[0].gather(1, tokens[rows, position, None]) for tokens in (first, second)]
    apart = float(torch.maximum((logits[0] - logits[1]).abs().max(), (chosen[0] - chosen[1]).abs().max()) / scale)
    if not apart <= tolerance:  # logits that are not numbers agree with nothing
        raise VerificationError(
            f"{names[0]} and {names[1]} generate different tokens from position {position} on (their logits differ by "
            f"{apart:.1e} relative): no speed is reported for models that do not compute the same"
        )
