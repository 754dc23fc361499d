"""Find out which tensors of a checkpoint's files become which parameters of the model, by transformers' own rules."""

from __future__ import annotations

import importlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from normsmith.errors import InputError
from normsmith.surgery.shards import FLOATS, Checkpoint, Entry
from normsmith.surgery.uses import Reader


@dataclass(frozen=True)
class Stored:
    """A tensor in the files that becomes a parameter, or one part of it.

    `lead` is the number of axes that loading puts in front (one for a stack of experts, one tensor each), `joined` the
    parameter's axes along which loading joins several tensors. None for both: loading rearranges it in another way.
    """

    entry: Entry
    lead: int | None = 0
    joined: tuple[int, ...] | None = ()

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is the parameter as it stands."""
        return self.lead == 0 and self.joined == ()

    def axis_of(self, reader: Reader, shape: Iterable[int]) -> int | None:
        """The tensor's axis that meets what `reader` reads; None if that cannot be said of all of the tensor."""
        if self.is_whole:
            return reader.axis
        if self.lead is None or self.joined is None or reader.axis < self.lead or reader.axis in self.joined:
            return None
        return reader.axis - self.lead if reader.bounds == tuple((0, size) for size in shape) else None


class Names:
    """Where a model's parameters lie in the files of a checkpoint."""

    def __init__(self, model: nn.Module, files: Checkpoint) -> None:
        self._model, self._files = model, files
        self._rename, self._converters = _rules(model)
        first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
        every = model.named_parameters(remove_duplicate=False)
        self._first = {name: first[id(parameter)] for name, parameter in every}  # of tied names, the first
        self.parameters = set(self._first.values())  # every parameter once, under its first name
        self.stored: dict[str, list[Stored]] = defaultdict(list)
        for entry in sorted(files.entries.values(), key=lambda entry: entry.name):
            self._place(entry)
        self._check()

    def of(self, parameter: str) -> list[Stored]:
        """The tensors that become this parameter; none for a name that the model does not have."""
        return self.stored.get(self._first.get(parameter, parameter), [])

    def one(self, parameter: str) -> Entry | None:
        """The one tensor that is this parameter as it stands, if it is so."""
        stored = self.of(parameter)
        return stored[0].entry if len(stored) == 1 and stored[0].is_whole else None

    def shape(self, parameter: str) -> tuple[int, ...]:
        """The parameter's shape in the model."""
        return tuple(self._model.get_parameter(parameter).shape)

    def stays(self, name: str) -> bool:
        """Whether a tensor stored under this name would be loaded under it."""
        return self._rename(name)[0] == name

    def _place(self, entry: Entry) -> None:
        name, pattern = self._rename(entry.name)
        converter = next((c for c in self._converters if pattern in c.source_patterns), None) if pattern else None
        if converter is None:
            if name in self._first:
                self.stored[self._first[name]].append(Stored(entry))
            return
        start = converter.target_patterns[0]
        for target in converter.target_patterns:
            parameter = self._first.get(name.replace(start, target, 1))
            if parameter is not None:
                ndim = self._model.get_parameter(parameter).ndim
                self.stored[parameter].append(Stored(entry, *_arrangement(converter, ndim)))

    def _check(self) -> None:
        """Every parameter must be there, whole, in the shape that the configuration says and not quantised."""
        folder = self._files.folder
        ignored: Any = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        for name, parameter in self._model.named_parameters():
            stored = self.stored.get(name, [])
            if not stored and not any(re.search(pattern, name) for pattern in ignored):
                raise InputError(
                    f"{folder}: the files hold no {name}, which the model needs; the checkpoint is incomplete"
                )
            for part in stored:
                entry = part.entry
                if parameter.is_floating_point() and entry.dtype not in FLOATS:
                    raise InputError(
                        f"{entry.path}: {entry.name} is quantised ({entry.dtype}), so it cannot be multiplied; fold "
                        "the unquantised model, then quantise"
                    )
                if part.is_whole and entry.shape != tuple(parameter.shape):
                    raise InputError(
                        f"{entry.path}: {entry.name} has the shape {list(entry.shape)}, the configuration says "
                        f"{list(parameter.shape)}"
                    )
            if any(part.joined is None or part.is_whole for part in stored):
                continue
            held = sum(math.prod(part.entry.shape) for part in stored)
            if stored and held != parameter.numel():
                raise InputError(
                    f"{folder}: {name} is put together from {len(stored)} tensors like {stored[0].entry.name}, which "
                    f"hold {held:,} of its {parameter.numel():,} values; the checkpoint is incomplete"
                )


def _rules(model: nn.Module) -> tuple[Callable[[str], tuple[str, str | None]], list[Any]]:
    """How `from_pretrained` renames tensors, and the converters that put several together."""
    try:
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        loading: Any = importlib.import_module("transformers.core_model_loading")
    except (ImportError, AttributeError):  # not a public part of transformers: without it names must be equal
        return _unchanged, []
    renamings = [rule for rule in mapping if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, loading.WeightConverter)]
    prefix, state = getattr(model, "base_model_prefix", None), model.state_dict()

    def rename(name: str) -> tuple[str, str | None]:
        return loading.rename_source_key(name, renamings, converters, prefix, state)

    return rename, converters


def _unchanged(name: str) -> tuple[str, str | None]:
    return name, None


def _arrangement(converter: Any, ndim: int) -> tuple[int | None, tuple[int, ...] | None]:
    """`lead` and `joined` of a converter that stacks tensors in front, joins them, or both in this order."""
    lead, joined = 0, []
    for operation in converter.operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist" and operation.dim == 0 and not joined and not lead:
            lead = 1
        elif kind == "Concatenate":
            joined.append(operation.dim % ndim)
        else:
            return None, None
    return lead, tuple(joined)
