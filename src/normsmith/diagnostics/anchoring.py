"""Scale anchoring as measurements: does the model grow its logits because nothing holds the scale of the stream?

Where the last map before the head does not depend on the scale of h (a final norm), ⟨∇_h CE, h⟩ = 0. Without one the
logits are linear in h, and ⟨∇_h CE, h⟩ = Σ_j p_j·z_j − z_y ≤ −(1 − p_y)·m < 0 for a token whose correct logit z_y leads
by the margin m > 0: gradient descent lets h and the logits grow. (TaperNorm, arXiv 2602.10408, section 4.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from normsmith.diagnostics.blocks import evaluating
from normsmith.diagnostics.roles import WeightPart, weight_parts
from normsmith.errors import InputError
from normsmith.surgery.example import placed
from normsmith.surgery.find import find_norms


@dataclass(frozen=True)
class Anchoring:
    """What `anchoring` measured, over the tokens of all batches that are no padding.

    `logit_norm` is the mean of ‖logits‖₂; `scale_mean` and `scale_std` are those of s(h), the RMS (for a LayerNorm the
    deviation) of h, the final norm's input, or the head's without one; `radial` is the mean of ⟨∇_h CE, h⟩ over the
    tokens that predict another, in nats. `gradients` gives by role of the weight (see `weight_parts`) the Frobenius
    norm of the mean loss's gradient, averaged over the blocks. `loss` is the mean cross-entropy.
    """

    loss: float
    logit_norm: float
    scale_mean: float
    scale_std: float
    radial: float
    gradients: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


class Scales:
    """Watches logits and s(h) in the forward passes of a model; `drain()` gives the means so far and starts anew.

    Args:
        model: a causal language model.
        keep: also keep h of the last pass, so that its gradient can be asked for.
        when: called before each pass is counted; False leaves it out.
    """

    def __init__(self, model: nn.Module, keep: bool = False, when: Callable[[], bool] = lambda: True) -> None:
        self.keep, self.when = keep, when
        self.h: Tensor | None = None
        self._mask: Tensor | None = None
        self._sums = torch.zeros(4, dtype=torch.float64)  # tokens, s(h), its square, ‖logits‖
        module, self.centred = final_input(model)
        self._handles = [
            module.register_forward_pre_hook(self._stream),
            model.register_forward_pre_hook(self._padding, with_kwargs=True),
            model.register_forward_hook(self._logits),
        ]

    def _padding(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _stream(self, module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        if not self.when():
            return None
        h = args[0]
        if self.keep:
            self.h = h if h.requires_grad else h.detach().requires_grad_()
            h = self.h
        wide = h.detach().double() if h.device.type == "cpu" else h.detach().float()
        wide = wide - wide.mean(-1, keepdim=True) if self.centred else wide
        s = wide.square().mean(-1).sqrt().flatten()
        weights = self._weights(s)
        self._sums = self._sums.to(s.device)
        self._sums[:3] += torch.stack((weights.sum(), (weights * s).sum(), (weights * s.square()).sum()))
        return (h, *args[1:])

    def _logits(self, module: nn.Module, args: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if logits is not None and self.when():
            norms = logits.detach().float().norm(dim=-1).flatten()
            self._sums[3] += (self._weights(norms) * norms).sum().double()

    def _weights(self, values: Tensor) -> Tensor:
        mask = self._mask
        fits = mask is not None and mask.numel() == values.numel()
        return (mask != 0).flatten().to(values) if fits and mask is not None else torch.ones_like(values)

    def discard(self) -> None:
        """Forget the passes so far."""
        self._sums.zero_()

    def drain(self, shared: torch.device | None = None) -> dict[str, float]:
        """`logit_norm`, `stream_scale_mean` and `stream_scale_std`; empty if no pass was counted.

        With `shared`, the device that the process group communicates from, over what all ranks counted together.
        """
        if shared is not None and distributed.is_available() and distributed.is_initialized():
            self._sums = self._sums.to(shared)
            distributed.all_reduce(self._sums)
        tokens, total, squares, logits = self._sums.tolist()
        self._sums.zero_()
        if not tokens:
            return {}
        mean = total / tokens
        std = max(squares / tokens - mean**2, 0.0) ** 0.5  # in this order NaN stays NaN
        return {"logit_norm": logits / tokens, "stream_scale_mean": mean, "stream_scale_std": std}

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def final_input(model: nn.Module) -> tuple[nn.Module, bool]:
    """The module whose input is the end of the stream, and whether it subtracts the mean: final norm, or head."""
    final = next((site for site in reversed(find_norms(model)) if site.role == "final"), None)
    if final is not None:
        return final.module, final.facts.centred or bool(getattr(final.module, "centred", False))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore[reportCallIssue]
    if head is None:
        raise InputError(
            f"{type(model).__name__} has neither a final norm nor an output head whose input could be measured"
        )
    return head, False


def anchoring(model: nn.Module, batches: Iterable[Tensor | dict[str, Tensor]]) -> Anchoring:
    """Measure logit norm, scale of the stream, radial product and gradient norms of a causal language model.

    Nothing is changed, gradients that the parameters hold neither. The model runs in evaluation mode.

    Args:
        model: a model that takes `input_ids` and returns `logits` that are a function of each token's h alone.
        batches: token ids (batch, time), or arguments with `input_ids` and perhaps `attention_mask` and `labels`.

    Raises:
        InputError: no batches, or the end of the stream cannot be found.
    """
    parts = weight_parts(model)
    parameters = dict(model.named_parameters())
    wanted = {p.parameter: parameters[p.parameter] for p in parts if parameters[p.parameter].requires_grad}
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in wanted.items()}
    scales = Scales(model, keep=True)
    loss, radial, count = 0.0, 0.0, 0
    try:
        with evaluating(model), torch.enable_grad():
            for batch in batches:
                inputs = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
                total, number = _loss(model, inputs)
                assert scales.h is not None
                found = torch.autograd.grad(total, [scales.h, *wanted.values()], allow_unused=True)
                radial += float((found[0].double() * scales.h.detach().double()).sum())
                for name, gradient in zip(wanted, found[1:], strict=True):
                    if gradient is not None:
                        sums[name] += gradient
                loss, count = loss + float(total.detach()), count + number
    finally:
        scales.close()
    if not count:
        raise InputError("anchoring needs at least one batch with tokens to predict")
    means = scales.drain()
    return Anchoring(
        loss / count,
        means["logit_norm"],
        means["stream_scale_mean"],
        means["stream_scale_std"],
        radial / count,
        _by_role(parts, {name: gradient / count for name, gradient in sums.items()}),
    )


def _loss(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of the cross-entropies of all predicted tokens, and their number."""
    inputs = placed(model, inputs)
    labels = inputs.pop("labels", inputs["input_ids"])
    if (mask := inputs.get("attention_mask")) is not None:
        labels = labels.masked_fill(mask == 0, -100)
    logits = model(**inputs).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    target = labels[:, 1:].flatten()
    return F.cross_entropy(wide[:, :-1].flatten(0, 1), target, reduction="sum"), int((target != -100).sum())


def _by_role(parts: list[WeightPart], gradients: dict[str, Tensor]) -> dict[str, float]:
    norms: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        if part.parameter in gradients:
            norms[part.role].append(float(part.norm(gradients[part.parameter])))
    return {role: sum(values) / len(values) for role, values in norms.items()}
