"""Several processes of one run, as torchrun starts them: who speaks and writes, and one error for all of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from normsmith.errors import NormsmithError

T = TypeVar("T")

# Rank 0 may tokenise or evaluate for hours while the others wait for it; a rank that dies is torchrun's to notice.
_PATIENCE = timedelta(days=30)


class RankError(NormsmithError):
    """Another rank of the run has failed; the message names it."""


def world_size() -> int:
    """How many processes share the run; 1 unless torchrun (or another launcher that sets its variables) started it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def local_rank() -> int:
    """The number of this process on its machine, from 0."""
    return int(os.environ["LOCAL_RANK"]) if world_size() > 1 else 0


def together(work: Callable[[], T]) -> T:
    """Do `work` on every rank and return what it gives here; where it fails on any of them, all fail.

    The failed ranks raise their own error and the others `RankError`, so that all of them end and none waits. Every
    rank must call it, and `work` must not communicate.
    """
    if world_size() == 1:
        return work()
    result, error = _attempt(work)
    _fail_together(gather(_described(error)), error)
    return result  # pyright: ignore[reportReturnType] (without an error there is a result)


def on_first(work: Callable[[], T]) -> T:
    """Do `work` on rank 0 alone and return its result on every rank, or fail on every rank.

    The others wait, however long it takes. The result must be something that pickles.
    """
    if world_size() == 1:
        return work()
    result, error = _attempt(work) if rank() == 0 else (None, None)
    found = gather((result, _described(error)))
    _fail_together([said for _, said in found], error)
    return found[0][0]  # pyright: ignore[reportReturnType] (without an error there is a result)


def gather(value: T) -> list[T]:
    """What every rank gives, in the order of the ranks, on every rank."""
    if world_size() == 1:
        return [value]
    from torch import distributed

    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, value, group=_waiting_room())
    return found


def leave() -> None:
    """End communication; every rank must have come here by itself, so that none waits for another."""
    if world_size() == 1:
        return
    from torch import distributed

    if distributed.is_initialized():
        _waiting_room.cache_clear()
        distributed.destroy_process_group()


@functools.cache
def _waiting_room() -> Any:
    """A group of all ranks whose messages stay off the accelerators, where waiting for long counts as a failure."""
    import torch
    from accelerate import PartialState
    from torch import distributed

    # As transformers' TrainingArguments would, which take over the default group that they find.
    PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(minutes=30))
    return distributed.new_group(backend="gloo", timeout=_PATIENCE)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # whatever it is, the other ranks must hear of it before it goes on
        return None, error


def _described(error: Exception | None) -> tuple[str, int] | None:
    if error is None:
        return None
    if isinstance(error, NormsmithError):
        return str(error), error.exit_code
    return f"{type(error).__name__}: {error}", NormsmithError.exit_code


def _fail_together(said: list[tuple[str, int] | None], own: Exception | None) -> None:
    failed = next(((number, told) for number, told in enumerate(said) if told is not None), None)
    if failed is None:
        return
    number, (message, code) = failed
    error = own or RankError(f"rank {number} of {len(said)} failed: {message}")
    if isinstance(error, NormsmithError):
        error.agreed, error.exit_code = True, code
    raise error
