"""The data of a run of several processes: one of them per machine reads, the others open what it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from normsmith import ranks
from normsmith.data.config import SourceConfig
from normsmith.data.examples import TaskData
from normsmith.data.kinds import load_data
from normsmith.data.text import TextData
from normsmith.errors import InputError

_SPLITS = ("train", "validation", "test")


def load_shared(config: SourceConfig, progress: Callable[[str], None] | None = None) -> TextData | TaskData:
    """As `load_data`, on every rank; a text is read, tokenised and held in memory by one process of each machine only.

    Raises:
        InputError: what the loader refuses, or machines that read different data.
    """
    if ranks.world_size() == 1:
        return load_data(config, progress)
    reads = ranks.local_rank() == 0
    mine = ranks.together(lambda: load_data(config, progress) if reads else None)
    told = ranks.gather(_described(mine) if isinstance(mine, TextData) else None)
    description = told[ranks.rank() - ranks.local_rank()]
    # Examples of other kinds are small and live in memory; whoever reads second finds the downloads made.
    data = ranks.together(lambda: mine or (load_data(config) if description is None else _opened(description)))
    hashes = ranks.gather(data.data_hash)
    if other := next((number for number, found in enumerate(hashes) if found != hashes[0]), None):
        error = InputError(f"{config.source}: rank {other} reads other data than rank 0; give every machine the same")
        error.agreed = True
        raise error
    return data


def _described(data: TextData) -> dict[str, Any]:
    """All that makes a `TextData`, with the names of its files in place of their contents."""
    found: dict[str, Any] = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return {**found, **{name: None if found[name] is None else str(found[name].filename) for name in _SPLITS}}


def _opened(description: dict[str, Any]) -> TextData:
    names = {name: description[name] for name in _SPLITS}
    maps: dict[str, Any] = {n: None if path is None else np.load(path, mmap_mode="r") for n, path in names.items()}
    return TextData(**{**description, **maps})
