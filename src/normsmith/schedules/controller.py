"""Controllers: the only objects that advance schedules and change the state of norms."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from normsmith.errors import DivergedError, InputError
from normsmith.norms.tapered import TaperedNorm
from normsmith.ops.statistics import centre, widen
from normsmith.ops.taper import token_mean
from normsmith.schedules.overflow import Overflow, remedy
from normsmith.schedules.taper import TaperConfig
from normsmith.traits import is_encoder_decoder


class Controller:
    """Advances a schedule: call `step()` once after each optimiser step and add `auxiliary_loss()` to the loss.

    `steps` is the length of the run in optimiser steps; the Trainer fills it in, your own loop passes it where the
    controller is made.
    """

    stops_parameters = False
    """Whether parameters stop needing a gradient during the run, which distributed training must expect."""

    def __init__(self, steps: int | None = None) -> None:
        self.steps = steps
        self.completed = 0
        self._handles: list[RemovableHandle] = []  # of the hooks it watches the model with

    def length(self) -> int:
        """The run's number of optimiser steps, or an error that says how to give it."""
        if self.steps is None:
            raise InputError(
                "the schedule does not know how long the run is: pass steps= to what made it (taper_, freeze_gates_), "
                "or use a Trainer"
            )
        return self.steps

    def step(self) -> None:
        """One optimiser step is complete."""
        self.completed += 1

    def _follow(self, device: torch.device) -> None:
        # The model may have moved since the schedule was made (a Trainer does that), and numbers that stayed behind
        # would be waited for at every step; nccl takes none from the CPU.
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def auxiliary_loss(self) -> Tensor | float:
        """What the schedule adds to the loss of the last forward pass."""
        return 0.0

    def progress(self) -> dict[str, float]:
        """Numbers worth logging; reading them waits for the device."""
        return {}

    def diagnosis(self) -> str:
        """Where and when the forward pass stopped being finite on any rank, in a clause; empty while it is, or if not
        known. Where several ranks train, all of them call it.
        """
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Everything that is not in the model's own state, as JSON values."""
        return {"completed": self.completed, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        if self.steps is not None and state["steps"] != self.steps:
            raise InputError(
                f"the checkpoint belongs to a run of {state['steps']} steps, this run has {self.steps}: "
                "resume with the same number of steps"
            )
        self.steps, self.completed = state["steps"], state["completed"]

    def close(self) -> None:
        """Stop watching the model; the norms stay as they are."""
        for handle in self._handles:
            handle.remove()


class TaperController(Controller):
    """Calibrates tapered norms while g = 1, then moves their gate to 0; made by `taper_`.

    Args:
        config: the schedule.
        sites: the tapered norms by name.
        anchor: the final norm, whose input the scale loss anchors; None without one.
        steps: optimiser steps of the run.
    """

    def __init__(
        self, config: TaperConfig, sites: Mapping[str, TaperedNorm], anchor: nn.Module | None, steps: int | None = None
    ) -> None:
        super().__init__(steps)
        self.config, self.sites, self.anchor = config, dict(sites), anchor
        if steps is not None:
            config.span(steps)
        if config.order is not None and set(config.order) != set(self.sites):
            wrong = sorted(set(config.order) ^ set(self.sites))
            raise InputError(
                f"order must name every tapered site once: {wrong[0]} is only in "
                f"{'order' if wrong[0] in config.order else 'the model'}"
            )
        device = next(iter(self.sites.values())).scale.device
        self.moments = torch.zeros(len(self.sites), 2, device=device)  # moving averages of ‖x⊙γ‖²/s and ‖x⊙γ‖²
        self.overflow = Overflow([*self.sites, "the final norm"], device)
        self.target = torch.zeros((), device=device)  # moving average of the anchor's scale, frozen at the start
        self._scales: Tensor | None = None  # s(h) per token of the last forward pass, with its graph
        self._observed = torch.zeros(2, device=device)  # sum and number of the mean scales since the last step
        self._mask: Tensor | None = None  # of the last forward pass, 0 for padding
        self._mask_position = -1
        self._copied: tuple[tuple[float, ...], Tensor] | None = None  # weights of sites that are calibrated in turn
        self._handles = [] if anchor is None else [anchor.register_forward_pre_hook(self._observe)]

    def watch_padding(self, model: nn.Module) -> None:
        """From now on leave out of all statistics the tokens that the model's (batch, time) `attention_mask` masks.

        The padding of a model with encoder and decoder is not left out: its mask may belong to either.
        """
        names = list(inspect.signature(model.forward).parameters)
        if "attention_mask" in names and not is_encoder_decoder(model):
            self._mask_position = names.index("attention_mask")
            self._handles.append(model.register_forward_pre_hook(self._see_mask, with_kwargs=True))

    def _see_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = args[self._mask_position] if len(args) > self._mask_position else kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        for norm in self.sites.values():
            norm.token_mask = self._mask

    def _observe(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module.training and torch.is_grad_enabled():
            h = widen(args[0])
            if isinstance(module, nn.LayerNorm) or getattr(module, "centred", False):
                h = centre(h)  # the anchor's s is then σ, else the RMS
            self._scales = torch.sqrt(h.square().mean(-1) + 1e-12)

    def _take_scales(self) -> Tensor | None:
        scales, self._scales = self._scales, None
        if scales is not None:
            with torch.no_grad():
                mean = token_mean(scales, self._mask)
                self._observed = self._observed.to(mean.device) + torch.stack((mean, torch.ones_like(mean)))
        return scales

    def auxiliary_loss(self) -> Tensor | float:
        """λ·mean((s(h) − target)²) over the tokens of the last forward pass; 0 before the taper begins."""
        scales = self._take_scales()
        if scales is None or self.config.scale_loss == 0 or self.completed < self.config.span(self.length())[0]:
            return 0.0
        return self.config.scale_loss * token_mean((scales - self.target).square(), self._mask)

    @torch.no_grad()
    def step(self) -> None:
        """One optimiser step is complete: update the calibration or freeze it, and move the gates."""
        super().step()
        self._take_scales()
        self._follow(next(iter(self.sites.values())).scale.device)
        self.overflow.see(self.completed, [*(norm.sum_power for norm in self.sites.values()), self._observed[0]])
        starts = [start for start, _ in self._windows()]
        if self.completed <= max(starts):
            self._average(starts)
            self._calibrate([i for i, start in enumerate(starts) if start == self.completed])
        self._observed.zero_()
        for norm in self.sites.values():
            norm.sum_scaled.zero_()
            norm.sum_power.zero_()
            norm.batches.zero_()
        self._set_gates()

    def _windows(self) -> list[tuple[float, float]]:
        steps, count, order = self.length(), len(self.sites), self.config.order
        places = {name: i for i, name in enumerate(order or self.sites)}
        return [self.config.window(steps, places[name], count) for name in self.sites]

    def _weight(self, start: float) -> float:
        """The new sample's weight in averages that are frozen at `start`; 0 where it is not averaged."""
        if self.completed > start:
            return 0.0
        if self.config.calibration == "ema":
            return self.config.momentum
        number = self.completed - max(0.0, start - self.config.calibration_steps)
        return 1 / number if number > 0 else 0.0

    def _average(self, starts: list[float]) -> None:
        device = self.moments.device
        rows = [torch.stack((n.sum_scaled, n.sum_power)).to(device) / n.batches.to(device) for n in self.sites.values()]
        scale = self._observed[0] / self._observed[1].clamp_min(1)
        new = torch.cat((torch.stack(rows).flatten(), scale[None]))
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(new)
            new /= distributed.get_world_size()
        weights = self._weights(tuple(self._weight(start) for start in starts), device)
        # Not a product with the weight: where it is 0, what is averaged no longer may be anything.
        self.moments.copy_(
            torch.where(weights > 0, self.moments.lerp(new[:-1].view_as(self.moments), weights), self.moments)
        )
        if weight := self._weight(min(starts)):
            self.target.lerp_(new[-1], weight)

    def _weights(self, values: tuple[float, ...], device: torch.device) -> Tensor:
        """The weights as a column; equal ones are filled in on the device, others copied there when they change."""
        if len(set(values)) == 1:
            return torch.full((len(values), 1), values[0], device=device)
        if self._copied is None or self._copied[0] != values or self._copied[1].device != device:
            self._copied = values, torch.tensor(values, device=device)[:, None]
        return self._copied[1]

    def _calibrate(self, places: list[int]) -> None:
        if not places:
            return
        ema = self.config.calibration == "ema"
        share = 1 - (1 - self.config.momentum) ** self.completed if ema else 1.0  # of the averages that is not zero
        unbiased = self.moments / share
        scales = unbiased[:, 0] / (unbiased[:, 1] + 1e-12)
        usable = scales.isfinite() & (unbiased[:, 1] != 0)
        names, sites = list(self.sites), list(self.sites.values())
        if broken := [i for i in places if not usable[i]]:
            if where := self.diagnosis():
                what = remedy(sites[broken[0]].gamma.dtype)
                raise DivergedError(
                    f"{names[broken[0]]} cannot be calibrated at step {self.completed}: {where}; {what}"
                )
            raise InputError(
                f"{names[broken[0]]}: no usable statistics by step {self.completed}, so its scale cannot be "
                "calibrated; run the forward passes of the warm-up in training mode, and check that the loss is finite"
            )
        if self.completed == self.config.span(self.length())[0]:
            self.target /= share
        for i in places:
            sites[i].scale.copy_(scales[i])
            sites[i].gamma_tilde.copy_(sites[i].gamma)

    def _set_gates(self) -> None:
        steps, count, order = self.length(), len(self.sites), self.config.order
        places = {name: i for i, name in enumerate(order or self.sites)}
        for (name, norm), (start, _) in zip(self.sites.items(), self._windows(), strict=True):
            gate = self.config.gate(self.completed, steps, places[name], count)
            final = self.completed >= start and self.config.evaluate == "final"
            norm.gate.fill_(gate)
            norm.gate_eval.fill_(0.0 if final else gate)

    def diagnosis(self) -> str:
        """The first site whose input was not finite, with the gate now."""
        self.overflow.share()
        where = str(self.overflow)
        gates = torch.stack([norm.gate for norm in self.sites.values()])
        return where and f"{where} (mean gate now {float(gates.mean()):.2g})"

    def progress(self) -> dict[str, float]:
        """The mean gate; from the start of the taper also the target of the scale loss."""
        gates = torch.stack([norm.gate for norm in self.sites.values()]).double()
        logged = {"gate": float(gates.mean())}
        if self.anchor is not None and self.steps and self.completed >= self.config.span(self.steps)[0]:
            logged["scale_target"] = float(self.target)
        return logged

    def state_dict(self) -> dict[str, Any]:
        """Schedule position, moving averages and target; the gates and scales are in the model's state."""
        return {
            **super().state_dict(),
            "config": self.config.to_dict(),
            "moments": self.moments.tolist(),
            "target": self.target.item(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; another schedule is refused."""
        if state["config"] != self.config.to_dict():
            changed = [k for k, v in self.config.to_dict().items() if state["config"].get(k) != v]
            raise InputError(
                f"the checkpoint was tapered with another {', '.join(changed)}: resume with the same schedule"
            )
        super().load_state_dict(state)
        self.moments.copy_(torch.tensor(state["moments"]))
        self.target.fill_(state["target"])
        self._set_gates()

    def __getstate__(self) -> dict[str, Any]:
        # Part of a graph, which can be neither copied nor stored, and of a batch.
        return {**self.__dict__, "_scales": None, "_mask": None}


def watching_controllers(model: nn.Module) -> list[Controller]:
    """Every controller that watches a module of `model`."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]  # pyright: ignore[reportPrivateUsage]
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, Controller)))


def close_controllers(model: nn.Module) -> None:
    """Close every controller that still watches a module of `model`."""
    for controller in watching_controllers(model):
        controller.close()
