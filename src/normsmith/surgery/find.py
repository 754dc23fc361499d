"""List the places in a model where a norm stands, what each one is for, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normsmith.errors import InputError
from normsmith.norms import Norm
from normsmith.surgery.table import text_table
from normsmith.surgery.trace import Readers, trace_readers

NONE_FOUND = "no norm of a known kind was found (normsmith's own, nn.LayerNorm, nn.RMSNorm)"


@dataclass(frozen=True)
class Site:
    """One place in one model where a norm stands.

    `role` is `final` for the norm that the output head (a linear layer whose result the model returns) reads, `pre` for
    one whose only readers are other linear layers, and `other` for the rest (a post-norm also feeds the residual
    stream). `blocked` says why its output scale cannot be absorbed by its readers, or is empty.
    """

    name: str
    module: nn.Module
    role: str
    readers: tuple[str, ...]
    blocked: str

    @property
    def kind(self) -> str:
        """Registry name of a normsmith norm, class name of any other."""
        return self.module.config.kind if isinstance(self.module, Norm) else type(self.module).__name__


class Sites(tuple[Site, ...]):
    """The sites of a model in the order of its modules; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return NONE_FOUND
        rows = [(s.name, s.kind, s.role, ", ".join(_leaf(r) for r in s.readers), s.blocked or "yes") for s in self]
        return text_table(("site", "kind", "role", "read by", "foldable"), rows)


def find_norms(model: nn.Module, example: Any = None) -> Sites:
    """Find every norm of `model` and trace who reads it; nothing is changed.

    Args:
        model: any module; norms are recognised as `normsmith.norms.Norm`, `nn.LayerNorm` and `nn.RMSNorm`.
        example: keyword arguments or an input for one forward pass; default: a few token ids, for models with a
            `config.vocab_size`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"find_norms takes a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # a compiled model is a wrapper around the one that is meant
    modules = {n: m for n, m in model.named_modules() if isinstance(m, Norm | nn.LayerNorm | nn.RMSNorm)}
    traced, heads = trace_readers(model, modules, lambda: run_example(model, example))
    return Sites(Site(name, module, *_judge(traced[name], heads)) for name, module in modules.items())


def run_example(model: nn.Module, example: Any) -> Any:
    """One forward pass on `example` (a mapping of arguments, a tensor, or None for a few token ids)."""
    if example is None:
        config = getattr(model, "config", None)
        vocab_size, device = getattr(config, "vocab_size", None), next(model.parameters()).device
        if vocab_size is None:
            raise InputError(
                f"{type(model).__name__} has no config.vocab_size: pass example=, an input for one forward pass, "
                "for instance example=torch.randn(2, 16, 64)"
            )
        generator = torch.Generator().manual_seed(0)
        example = {"input_ids": torch.randint(vocab_size, (2, 16), generator=generator).to(device)}
    with torch.compiler.set_stance("force_eager"):  # compiled code has no operations to watch
        return model(**example) if isinstance(example, dict) else model(example)


def _judge(readers: Readers, heads: set[str]) -> tuple[str, tuple[str, ...], str]:
    """(role, readers, blocked)."""
    linears = tuple(readers.linears)
    if not readers.runs:
        return "other", linears, "never ran on the example"
    role = "final" if heads & set(linears) else "pre" if linears and not readers.others else "other"
    if readers.others:
        return role, linears, "also read by " + ", ".join(dict.fromkeys(readers.others))
    return role, linears, "" if linears else "no linear layer reads it"


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
