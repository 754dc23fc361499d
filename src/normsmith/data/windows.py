"""Token ids cut into windows of equal length, in an order that depends on nothing but the seed."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from normsmith.errors import InputError


def count_windows(ids: npt.NDArray[Any], sequence_length: int, what: str = "text") -> int:
    """Whole windows of `sequence_length` tokens in `ids`; `InputError` where there is none, with `what` as its name."""
    if len(ids) < sequence_length:
        split = what.removesuffix(" split")
        raised = f" or raise {split}_fraction" if split in ("validation", "test") else ""
        raise InputError(
            f"the {what} has {len(ids)} tokens, one window needs {sequence_length}: lower sequence_length"
            f"{raised}, or give more text"
        )
    return len(ids) // sequence_length


class Ordered(Dataset[dict[str, torch.Tensor]]):
    """A data set that decides its own order, which a Trainer must read from the first item to the last."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__()")


class PackedWindows(Ordered):
    """Windows of `T` tokens with stride `T` over `ids (n,)`; the rest of fewer than `T` tokens is left out.

    Item i is `{"input_ids": (T,) int64, "labels": the same tensor}`: transformers models shift labels themselves. With
    a seed, each epoch is a permutation drawn from (seed, epoch) alone, so a sequential sampler sees the same order
    whatever the batch size, the number of workers and torch's own random state. Without one, the order is the text's.

    Args:
        ids: token ids, any integer type, may be memory-mapped.
        sequence_length: T.
        seed: not negative; `None` for the order of the text.
        num_items: length of the data set, over as many epochs as it takes; default one epoch.

    Raises:
        InputError: `ids` is shorter than one window, or `seed` or `num_items` is out of range.
    """

    def __init__(
        self, ids: npt.NDArray[Any], sequence_length: int, seed: int | None = None, num_items: int | None = None
    ) -> None:
        if seed is not None and seed < 0:
            raise InputError(f"seed {seed}: must not be negative")
        if num_items is not None and num_items < 1:
            raise InputError(f"num_items {num_items}: must be at least 1")
        self.ids, self.sequence_length, self.seed = ids, sequence_length, seed
        self.windows = count_windows(ids, sequence_length)
        self.num_items = self.windows if num_items is None else num_items

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.num_items:
            raise IndexError(f"item {index} of {self.num_items}")
        epoch, place = divmod(index, self.windows)
        window = place if self.seed is None else int(epoch_order(self.seed, epoch, self.windows)[place])
        start = window * self.sequence_length
        tokens = torch.from_numpy(self.ids[start : start + self.sequence_length].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


@functools.lru_cache(maxsize=8)
def epoch_order(seed: int, epoch: int, n: int) -> npt.NDArray[np.intp]:
    """The order of n items in an epoch: a permutation drawn from (seed, epoch) alone."""
    # Sorting raw Philox words: numpy promises that this stream never changes, but not what Generator.permutation does.
    words = np.random.Philox(np.random.SeedSequence((seed, epoch))).random_raw(n)
    return np.argsort(words, kind="stable")
