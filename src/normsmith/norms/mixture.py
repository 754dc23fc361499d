"""What norms made of candidate norms share: the candidates themselves, and how they start from a trained norm."""

from __future__ import annotations

from typing import Annotated, Any, Self, cast

import pydantic
import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.norms.base import Norm, NormConfig, norm_config, norms, shared_options
from normsmith.ops.gate import mix
from normsmith.ops.statistics import widen

Candidate = Annotated[pydantic.SerializeAsAny[NormConfig], pydantic.BeforeValidator(lambda spec: norm_config(spec))]


def _listed(value: Any) -> Any:
    # Commas separate the options of an arm on a command line, so the candidates there are written a/b/c.
    return tuple(value.split("/")) if isinstance(value, str) else value


class MixtureConfig(NormConfig):
    """`candidates` are the norms that are mixed: two or more names or configurations, or one text `layernorm/dyt`."""

    candidates: Annotated[tuple[Candidate, ...], pydantic.BeforeValidator(_listed)] = pydantic.Field(
        default=cast("tuple[NormConfig, ...]", ("layernorm", "dyt"))
    )

    def check(self) -> None:
        """A choice needs two different candidates."""
        if len(self.candidates) < 2:
            raise ValueError(
                f"candidates has {len(self.candidates)} norm(s), and a choice needs at least two; write for example "
                "candidates: [layernorm, dyt]"
            )
        for i, candidate in enumerate(self.candidates):
            if candidate in self.candidates[:i]:
                raise ValueError(
                    f"candidates names {candidate.kind} twice with the same options, so there is nothing to choose "
                    "between them; change one of them"
                )


class MixtureNorm(Norm):
    """Σ_k w_k·candidate_k(x); subclasses say where the weights come from."""

    Config = MixtureConfig
    config: MixtureConfig

    def __init__(self, width: int, config: NormConfig | None = None, **options: Any) -> None:
        super().__init__(width, config, **options)
        made = [norms.get(candidate.kind)(width, candidate) for candidate in self.config.candidates]
        for candidate in made:
            if any(True for _ in candidate.buffers()):
                raise InputError(
                    f"{candidate.kind} cannot be a candidate of {self.kind}: a schedule changes its state; use a norm "
                    "without a gate of its own"
                )
        self.candidates = nn.ModuleList(made)

    @property
    def names(self) -> tuple[str, ...]:
        """The candidates' kinds, numbered where two are of one kind."""
        kinds = [str(candidate.kind) for candidate in self.config.candidates]
        return tuple(f"{kind}{i}" if kinds.count(kind) > 1 else kind for i, kind in enumerate(kinds))

    def _mixed(self, x: Tensor, weights: Tensor) -> Tensor:
        wide = widen(x)
        return mix(weights, [candidate(wide) for candidate in self.candidates]).to(x.dtype)

    @classmethod
    def from_site(cls, old: nn.Module, width: int, config: NormConfig | None = None) -> Self:
        """One candidate is the old norm itself, the others start from copies of its gain and shift.

        The candidate of the old norm's kind (the first one, if there is none) takes its parameters as the same objects.
        Options that a candidate's specification leaves out come from the old norm. From a norm of the same
        configuration everything is taken over.
        """
        chosen = cast("MixtureConfig", shared_options(cls, old) if config is None else config)
        if isinstance(old, MixtureNorm) and [c.kind for c in old.config.candidates] == [
            c.kind for c in chosen.candidates
        ]:
            new = super().from_site(old, width, chosen)
            for i, spec in enumerate(chosen.candidates):
                new.candidates[i] = norms.get(spec.kind).from_site(old.candidates[i], width, spec)
            return new.train(old.training)
        kinds = [candidate.kind for candidate in chosen.candidates]
        kind = old.config.kind if isinstance(old, Norm) else ""
        heir = kinds.index(kind) if kind in kinds else 0
        specs = [_completed(candidate, old) for candidate in chosen.candidates]
        new = cls(width, chosen.model_copy(update={"candidates": tuple(specs)}))
        example = next(old.parameters(), None)
        if example is not None:
            new.to(device=example.device, dtype=example.dtype)
        for i, spec in enumerate(specs):
            candidate = norms.get(spec.kind).from_site(old, width, spec)
            if i != heir:
                _own_parameters(candidate)
            new.candidates[i] = candidate
        return new.train(old.training)

    def match(self, x: Tensor, y: Tensor) -> None:
        """Every candidate is fitted to the old output by itself."""
        for candidate in self.candidates:
            cast("Norm", candidate).match(x, y)


def _completed(spec: NormConfig, old: nn.Module) -> NormConfig:
    """The candidate's configuration, with what it does not say taken from the old norm."""
    shared = shared_options(norms.get(spec.kind), old).model_dump(mode="json", exclude_unset=True)
    given = spec.model_dump(mode="json", exclude_unset=True)
    return norm_config({**shared, **given, "kind": spec.kind})


def _own_parameters(norm: nn.Module) -> None:
    for module in norm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            copied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(module, name, copied)


def uniform_start(shape: tuple[int, int]) -> Tensor:
    """An (out, in) matrix with the start of `nn.Linear`: uniform within ±1/√in."""
    return torch.empty(shape).uniform_(-1, 1) / shape[1] ** 0.5
