"""The controller that watches gates and freezes them: the gate-freeze schedule carried out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from normsmith.errors import DivergedError, InputError
from normsmith.norms.autonorm import AutoNorm
from normsmith.schedules.controller import Controller
from normsmith.schedules.gate_freeze import GateFreezeConfig


class GateState(NamedTuple):
    """One gate as it is now: running means of entropy (nats) and weights, its candidates, and whether it is frozen.

    Entropy and weights are NaN before a step was monitored.
    """

    site: str
    candidates: tuple[str, ...]
    entropy: float
    weights: tuple[float, ...]
    frozen: bool
    static: bool


class GateController(Controller):
    """Monitors the gates of AutoNorm sites, anneals their temperature, and freezes them; made by `freeze_gates_`.

    A frozen gate draws no noise, and its selector's parameters need no gradient and have none, so that every optimiser
    of torch.optim leaves them alone from then on, weight decay and momentum included: nothing else has to be called in
    a loop of your own. They stay in the optimiser's groups, so that its checkpoints can be resumed.

    Args:
        config: the schedule.
        sites: the AutoNorms by name.
        steps: optimiser steps of the run.
    """

    def __init__(self, config: GateFreezeConfig, sites: Mapping[str, AutoNorm], steps: int | None = None) -> None:
        super().__init__(steps)
        self.config, self.sites = config, dict(sites)
        # Of a run before; a model without values, which is built to look at, was never in one.
        frozen = any(not norm.frozen.is_meta and bool(norm.frozen > 0) for norm in sites.values())
        self.stops_parameters = frozen or config.rule != "never"
        if steps is not None:
            config.span(steps)
        self.thresholds = [config.threshold(len(norm.candidates)) for norm in self.sites.values()]
        # Per site the running means of the weights, padded with zeros, then that of the entropy; on the device, so that
        # monitoring waits for nothing.
        self._widest = max(len(norm.candidates) for norm in self.sites.values())
        self.means = torch.zeros(len(self.sites), self._widest + 1, device=next(iter(self.sites.values())).tau.device)
        self.samples = torch.zeros((), device=self.means.device)  # steps in the running means
        self.decided: dict[str, float] | None = None  # at T_freeze: site → the entropy that decided
        # Gates that were frozen before. Not at once: an optimiser that resumes a run must hold all parameters first.
        self._adopted = False

    def _adopt_frozen(self) -> None:
        self._adopted = True
        for norm in self.sites.values():
            if bool(norm.frozen > 0):
                _stop(norm)

    @torch.no_grad()
    def step(self) -> None:
        """One optimiser step is complete: take the record of the forward passes, decide at T_freeze, move τ."""
        super().step()
        self._follow(next(iter(self.sites.values())).tau.device)
        if not self._adopted:
            self._adopt_frozen()
        first, freeze = self.config.span(self.length())
        self._average(monitored=self.completed > first)
        if self.completed == freeze:
            self._decide()
        self._anneal()

    def _average(self, monitored: bool) -> None:
        rows: list[Tensor] = []
        for norm in self.sites.values():
            row = torch.zeros(self._widest + 2, device=self.means.device)
            row[: len(norm.weight_sum)] = norm.weight_sum.to(row)
            row[-2], row[-1] = norm.entropy_sum.to(row), norm.batches.to(row)
            rows.append(row)
            norm.weight_sum.zero_()
            norm.entropy_sum.zero_()
            norm.batches.zero_()
        sums = torch.stack(rows)
        new = sums[:, :-1] / sums[:, -1:].clamp_min(1)
        seen = (sums[:, -1] > 0).all().to(new)
        if distributed.is_available() and distributed.is_initialized():
            new = torch.cat((new.flatten(), seen[None]))
            distributed.all_reduce(new)
            new = new / distributed.get_world_size()
            new, seen = new[:-1].view_as(self.means), new[-1].floor()
        if monitored:  # a step without a forward pass in training mode says nothing
            self.means.lerp_(new, self.config.momentum * seen)
            self.samples += seen

    def _unbiased(self) -> Tensor:
        share = 1 - (1 - self.config.momentum) ** self.samples  # of the running means that is not their zero start
        return self.means / share.clamp_min(1e-12)

    def _decide(self) -> None:
        values = self._unbiased()
        entropies: list[float] = values[:, -1].tolist()
        by_entropy, always = self.config.rule in ("not_below", "below"), self.config.rule == "always"
        asked = by_entropy or (always and self.config.mode == "static")
        if asked and float(self.samples) == 0:
            raise InputError(
                f"no entropy was measured by step {self.completed}, so whether to freeze cannot be decided; run the "
                "forward passes in training mode"
            )
        lost = [name for name, entropy in zip(self.sites, entropies, strict=True) if not math.isfinite(entropy)]
        if asked and lost:
            raise DivergedError(
                f"the entropy of {lost[0]} is not finite by step {self.completed}, so a forward pass before was not: "
                "lower the learning rate or lengthen the warm-up"
            )
        self.decided = dict(zip(self.sites, entropies, strict=True))
        thresholds = self.thresholds
        if self.config.scope == "model":  # one decision, from the means over the sites
            count = len(entropies)
            entropies, thresholds = [math.fsum(entropies) / count] * count, [math.fsum(thresholds) / count] * count
        for norm, row, entropy, threshold in zip(self.sites.values(), values, entropies, thresholds, strict=True):
            if self.config.freezes(entropy, threshold):
                self._freeze(norm, row[: len(norm.candidates)])

    def _freeze(self, norm: AutoNorm, weights: Tensor) -> None:
        norm.frozen.fill_(1)
        norm.noise.fill_(0)
        if self.config.mode == "static":
            norm.static.fill_(1)
            norm.static_weights.copy_(weights / weights.sum())
        _stop(norm)

    def _anneal(self) -> None:
        part = self.completed / self.length()
        for norm in self.sites.values():
            if norm.config.tau_end is not None:
                target = norm.config.tau * (norm.config.tau_end / norm.config.tau) ** part
                # A frozen gate keeps the temperature that it was frozen with.
                norm.tau.copy_(torch.where(norm.frozen > 0, norm.tau, target))

    def gates(self) -> tuple[GateState, ...]:
        """Every gate as it is now; reading them waits for the device."""
        device = self.means.device
        flags = torch.stack([torch.stack((n.frozen, n.static)).to(device) for n in self.sites.values()])
        values = torch.where(self.samples > 0, self._unbiased(), math.nan)
        found: list[GateState] = []
        rows = torch.cat((values, flags), dim=1).tolist()  # read at once
        for (name, norm), (*row, entropy, frozen, static) in zip(self.sites.items(), rows, strict=True):
            weights = row[: len(norm.candidates)]
            if static:  # what the site applies, whatever its selector would say
                weights = norm.static_weights.tolist()
                entropy = -math.fsum(w * math.log(w) for w in weights if w > 0)
            found.append(GateState(name, norm.names, entropy, tuple(weights), frozen > 0, static > 0))
        return tuple(found)

    def progress(self) -> dict[str, float]:
        """Means over the sites: share of frozen gates; once a step was monitored, entropy and weight of each candidate
        (if all sites have the same); and the temperature, where it moves.
        """
        gates = self.gates()
        count = len(gates)
        logged = {"gate_frozen": sum(gate.frozen for gate in gates) / count}
        measured = float(self.samples) > 0 or all(gate.static for gate in gates)
        if measured:
            logged["gate_entropy"] = sum(gate.entropy for gate in gates) / count
        if measured and len({gate.candidates for gate in gates}) == 1:
            for i, name in enumerate(gates[0].candidates):
                logged[f"gate_weight_{name}"] = sum(gate.weights[i] for gate in gates) / count
        if any(norm.config.tau_end is not None for norm in self.sites.values()):
            logged["gate_tau"] = sum(float(norm.tau) for norm in self.sites.values()) / count
        return logged

    def state_dict(self) -> dict[str, Any]:
        """Position, running means and the decision; what is frozen is in the model's state."""
        return {
            **super().state_dict(),
            "config": self.config.to_dict(),
            "means": self.means.tolist(),
            "samples": self.samples.item(),
            "decided": self.decided,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the model's state loaded before; another schedule is refused."""
        if state["config"] != self.config.to_dict():
            changed = [k for k, v in self.config.to_dict().items() if state["config"].get(k) != v]
            raise InputError(
                f"the checkpoint's gates were watched with another {', '.join(changed)}: resume with the same schedule"
            )
        means = torch.tensor(state["means"])
        if means.shape != self.means.shape:
            raise InputError(
                f"the checkpoint watched {len(means)} gates of up to {means.shape[-1] - 1} candidates, this model has "
                f"{len(self.sites)} of up to {self._widest}: resume with the same norms"
            )
        super().load_state_dict(state)
        self.means.copy_(means)
        self.samples.fill_(state["samples"])
        self.decided = state["decided"]
        self._adopt_frozen()


def _stop(norm: AutoNorm) -> None:
    for parameter in norm.selector_parameters():
        parameter.requires_grad_(False)
        parameter.grad = None  # an optimiser passes over a parameter without one, whatever it remembers of it
