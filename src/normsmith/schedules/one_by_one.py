"""The controller that removes norms one by one: the sequential schedule carried out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed, nn

from normsmith.errors import DivergedError, InputError
from normsmith.norms.fakeln import FakeNorm
from normsmith.ops.statistics import centre, widen
from normsmith.ops.taper import token_mean
from normsmith.schedules.controller import Controller
from normsmith.schedules.overflow import Overflow, remedy
from normsmith.schedules.sequential import Removal, SequentialConfig, Uses
from normsmith.traits import is_encoder_decoder


class Split(Protocol):
    """The readers of one attention norm whose queries and keys are scaled apart from their values."""

    def settle(self) -> None:
        """Move the constant that is left between the two uses into the weights; the norm has one σ_avg from then on."""
        ...

    def close(self) -> None:
        """Take the hooks off the readers, if they do nothing any more."""
        ...


class OneByOneController(Controller):
    """Turns fake norms fake, one use after the other; made by `remove_one_by_one_`.

    Args:
        config: the schedule.
        sites: the fake norms by name.
        uses: which of them are for what.
        splits: by name, the readers of those that are removed for queries and keys first.
        anchor: the final norm, at whose input the auxiliary loss is taken; None without one.
        end_tokens: ids of end-of-text tokens.
        steps: optimiser steps of the run.
    """

    def __init__(
        self,
        config: SequentialConfig,
        sites: Mapping[str, FakeNorm],
        uses: Uses,
        splits: Mapping[str, Split],
        anchor: nn.Module | None,
        end_tokens: Sequence[int] = (),
        steps: int | None = None,
    ) -> None:
        super().__init__(steps)
        self.config, self.sites, self.uses, self.splits, self.anchor = config, dict(sites), uses, dict(splits), anchor
        if steps is not None:
            config.plan(steps, uses)
        device = next(iter(self.sites.values())).sigma.device
        self.overflow = Overflow(self.sites, device)
        self.end_tokens = tuple(end_tokens)
        self.reasons: dict[str, str] = {}  # why a site of `uses.inseparable` is removed whole
        self.averages = torch.zeros(len(self.sites), 2, device=device)  # of σ, without first tokens, and of first ones
        self._scales: Tensor | None = None  # σ per token of the anchor's input, with its graph
        self._mask: Tensor | None = None  # of the last forward pass, 0 for padding
        self._first: Tensor | None = None
        self._end: Tensor | None = None
        self._places: dict[str, int] = {}
        self._handles = [] if anchor is None else [anchor.register_forward_pre_hook(self._observe)]
        for norm in self.sites.values():
            norm.keep_first.fill_(1.0)
        for name in self.splits:
            self.sites[name].keep_end.fill_(1.0 if self.end_tokens else 0.0)

    def watch_tokens(self, model: nn.Module) -> None:
        """From now on see in every forward pass of `model` which tokens are padding, first, and end-of-text.

        Not in a model with encoder and decoder, whose arguments may belong to either: there index 0 is first.
        """
        if is_encoder_decoder(model):
            return
        self._places = {name: i for i, name in enumerate(inspect.signature(model.forward).parameters)}
        self._handles.append(model.register_forward_pre_hook(self._see, with_kwargs=True))

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        def argument(name: str) -> Any:
            place = self._places.get(name, len(args))
            return args[place] if place < len(args) else kwargs.get(name)

        ids, mask = argument("input_ids"), argument("attention_mask")
        cache = argument("cache") or argument("past_key_values")  # its newer and its older name
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self._first = self._end = None
        if isinstance(ids, Tensor) and ids.ndim == 2:
            self._first = torch.zeros_like(ids, dtype=torch.bool)
            if self._mask is not None and self._mask.shape == ids.shape:
                real = self._mask != 0
                self._first = real & (real.long().cumsum(-1) == 1)
            elif cache is None or not cache.get_seq_length():  # else the sequence began in an earlier pass
                self._first[:, 0] = True
            if self.end_tokens:
                self._end = torch.zeros_like(self._first)
                for token in self.end_tokens:
                    self._end = self._end | (ids == token)
        for norm in self.sites.values():
            norm.token_mask, norm.first_tokens, norm.end_tokens = self._mask, self._first, self._end

    def _observe(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module.training and torch.is_grad_enabled():
            h = widen(args[0])
            if isinstance(module, nn.LayerNorm) or getattr(module, "centred", False):
                h = centre(h)
            self._scales = torch.sqrt(h.square().mean(-1) + 1e-12)

    def auxiliary_loss(self) -> Tensor | float:
        """λ·mean((σ − σ̂)²) over the tokens of the last forward pass, σ̂ the mean without first and end-of-text ones."""
        scales, self._scales = self._scales, None
        if scales is None or self.config.scale_loss == 0:
            return 0.0
        ordinary = torch.ones_like(scales, dtype=torch.bool)
        if self._first is not None and self._first.shape == scales.shape:
            ordinary = ~self._first if self._end is None else ~(self._first | self._end)
        elif scales.ndim > 1:
            ordinary[..., 0] = False
        if self._mask is not None and self._mask.shape == scales.shape:
            ordinary = ordinary & (self._mask != 0)
        target = token_mean(scales.detach(), ordinary)
        return self.config.scale_loss * token_mean((scales - target).square(), self._mask)

    @torch.no_grad()
    def step(self) -> None:
        """One optimiser step is complete: update the running means, and do what is due."""
        super().step()
        self._follow(next(iter(self.sites.values())).sigma.device)
        self.overflow.see(self.completed, [norm.sum_sigma for norm in self.sites.values()])
        plan = self.config.plan(self.length(), self.uses)
        if self.completed <= plan[-1].step:
            self._average()
            for removal in plan:
                if removal.step == self.completed:
                    self._remove(removal)
        self._scales = None
        for norm in self.sites.values():
            norm.sum_sigma.zero_()
            norm.sum_first.zero_()
            norm.batches.zero_()

    def _average(self) -> None:
        device = self.averages.device
        rows = [torch.stack((n.sum_sigma, n.sum_first)).to(device) / n.batches.to(device) for n in self.sites.values()]
        new = torch.stack(rows)
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(new)
            new /= distributed.get_world_size()
        self.averages.lerp_(new, self.config.momentum)

    def _remove(self, removal: Removal) -> None:
        if removal.what in ("end", "first"):
            for norm in self.sites.values():
                (norm.keep_end if removal.what == "end" else norm.keep_first).zero_()
            if removal.what == "first":
                for split in self.splits.values():
                    split.settle()
            return
        norm = self.sites[removal.name]
        share = 1 - (1 - self.config.momentum) ** self.completed  # of the averages that is not zero
        found = self.averages[list(self.sites).index(removal.name)] / share
        if not bool(self.averages.isfinite().all() & (found > 0).all()):
            self._explain(removal)
        if removal.what == "qk":
            norm.sigma_qk.copy_(found[0])
            norm.fake_qk.fill_(1.0)
        else:
            norm.sigma.copy_(found[0])
            norm.fake.fill_(1.0)
        if norm.fake + norm.fake_qk == 1:  # the first use that goes decides; the same constant serves both
            norm.sigma_first.copy_(found[1])

    def _explain(self, removal: Removal) -> None:
        if where := self.diagnosis():
            dtype = self.sites[removal.name].gamma.dtype
            raise DivergedError(f"{removal.name} cannot be removed at step {self.completed}: {where}; {remedy(dtype)}")
        raise InputError(
            f"{removal.name}: no usable statistics by step {self.completed}, so its σ is not known; run the "
            "forward passes in training mode, with more than one token per sequence"
        )

    def diagnosis(self) -> str:
        """The first site whose input was not finite, with what was removed by then."""
        self.overflow.share()
        where = str(self.overflow)
        gone = [name for name, norm in self.sites.items() if bool((norm.fake + norm.fake_qk) > 0)]
        return where and f"{where} ({len(gone)} of {len(self.sites)} norms removed by now)"

    def progress(self) -> dict[str, float]:
        """The share of uses that still normalise, as `gate`, and how many exceptions are on."""
        flags = [norm.fake for norm in self.sites.values()] + [self.sites[name].fake_qk for name in self.splits]
        norm = next(iter(self.sites.values()))
        exceptions = torch.stack((norm.keep_first, *(self.sites[name].keep_end for name in list(self.splits)[:1])))
        return {"gate": 1 - float(torch.stack(flags).mean()), "exceptions": float(exceptions.sum())}

    def state_dict(self) -> dict[str, Any]:
        """Schedule position and running means; what is fake, and every σ_avg, is in the model's state."""
        return {**super().state_dict(), "config": self.config.to_dict(), "averages": self.averages.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; another schedule is refused."""
        mine = self.config.to_dict()
        if state["config"] != mine:
            theirs = cast("dict[str, Any]", state["config"])
            changed = [k for k, v in mine.items() if theirs.get(k) != v]
            raise InputError(
                f"the checkpoint was made with another {', '.join(changed)}: resume with the same schedule"
            )
        super().load_state_dict(state)
        self.averages.copy_(torch.tensor(state["averages"]))

    def close(self) -> None:
        """Stop watching anchor and model; readers keep their hooks while queries and keys differ from values."""
        super().close()
        for norm in self.sites.values():
            norm.token_mask = norm.first_tokens = norm.end_tokens = None  # of the last batch
        for split in self.splits.values():
            split.close()

    def __getstate__(self) -> dict[str, Any]:
        # Part of a graph, which can be neither copied nor stored, and of a batch.
        return {**self.__dict__, "_scales": None, "_mask": None, "_first": None, "_end": None}
