"""Examples with labels: three splits, an order that depends on the seed alone, and batches of unequal lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from normsmith.data.facts import Facts
from normsmith.data.sources import place
from normsmith.data.windows import Ordered, epoch_order
from normsmith.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Columns = Mapping[str, Sequence[Any] | npt.NDArray[Any]]
IGNORED = -100
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}


class Examples(Dataset[dict[str, Tensor]]):
    """n examples in their own order; item i is what `finish` makes of row i of every column."""

    def __init__(self, columns: Columns, finish: Callable[[dict[str, Any]], dict[str, Tensor]]) -> None:
        self.columns, self.finish = columns, finish
        self.count = len(next(iter(columns.values())))

    def __len__(self) -> int:
        return self.count

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as it was read."""
        return {name: column[index] for name, column in self.columns.items()}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(f"example {index} of {self.count}")
        return self.finish(self.row(index))


Change = Callable[[Examples, int, np.random.Generator], dict[str, Tensor]]
"""(examples, which one, randomness) → the item to train on."""


class TrainingExamples(Ordered):
    """`num_items` items over as many epochs as it takes; each epoch is a permutation drawn from (seed, epoch) alone.

    `change` augments an example with random numbers that depend on (seed, item) alone. So runs with the same seed, and
    a run that is continued, see the same items to the bit, whatever the batch size or the number of workers.
    """

    def __init__(self, examples: Examples, seed: int, num_items: int, change: Change | None = None) -> None:
        self.examples, self.seed, self.num_items, self.change = examples, seed, num_items, change

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.num_items:
            raise IndexError(f"item {index} of {self.num_items}")
        epoch, where = divmod(index, len(self.examples))
        chosen = int(epoch_order(self.seed, epoch, len(self.examples))[where])
        if self.change is None:
            return self.examples[chosen]
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, index, 1))))
        return self.change(self.examples, chosen, random)


@dataclass(frozen=True, eq=False)
class TaskData:
    """The data of a task with labels.

    Attributes:
        train: what is learned from.
        validation: what decides between models.
        test: what is looked at once, when a run has ended.
        facts: what the model must know.
        data_hash: SHA-256 over all three splits.
        source: as in the configuration.
        notes: what was done to the data that a reader of the result must know, one sentence each.
        moments: column or channel statistics of the training split, for models that standardise inside.
        tokenizer: what made token ids, where there are any.
        change: augmentation of the training split.
    """

    train: Examples
    validation: Examples
    test: Examples
    facts: Facts
    data_hash: str
    source: str
    notes: tuple[str, ...] = ()
    moments: Mapping[str, npt.NDArray[np.float64]] | None = None
    tokenizer: PreTrainedTokenizerFast | None = None
    change: Change | None = None


def smoothed(change: Change | None, smoothing: float, classes: int) -> Change | None:
    """`change` with labels as probabilities, (1 − s)·label + s/classes (label smoothing, arXiv 1512.00567)."""
    if not smoothing:
        return change

    def soften(examples: Examples, index: int, random: np.random.Generator) -> dict[str, Tensor]:
        item = examples[index] if change is None else change(examples, index, random)
        return {**item, "labels": (1 - smoothing) * as_probabilities(item["labels"], classes) + smoothing / classes}

    return soften


def as_probabilities(label: Tensor, classes: int) -> Tensor:
    """A class () or probabilities (classes,) as probabilities (classes,), float32."""
    if label.is_floating_point():
        return label
    return torch.nn.functional.one_hot(label, classes).float()


def collate(items: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack items to a batch; sequences are padded on the right to the longest of the batch."""
    batch: dict[str, Tensor] = {}
    for name in items[0]:
        tensors = [item[name] for item in items]
        if len({tensor.shape for tensor in tensors}) > 1:
            length = max(len(tensor) for tensor in tensors)
            padding = _PADDING[name]
            tensors = [torch.nn.functional.pad(t, (0, length - len(t)), value=padding) for t in tensors]
        batch[name] = torch.stack(tensors)
    return batch


def split_rows(keys: Sequence[str], validation: float, test: float) -> dict[str, list[int]]:
    """Row numbers of the `train`, `validation` and `test` splits by a hash of each key.

    Equal keys share a side, rows added later move none, and no seed changes it. With `test` 0 there is no test split.

    Raises:
        InputError: a split that is asked for gets no row.
    """
    found: dict[str, list[int]] = {"train": [], "validation": [], **({"test": []} if test else {})}
    for row, key in enumerate(keys):
        at = place(key)
        found["validation" if at < validation else "test" if at < validation + test else "train"].append(row)
    if empty := next((name for name, rows in found.items() if not rows), None):
        raise InputError(
            f"the {empty} split of {len(keys)} examples is empty; give more data"
            + (f" or raise {empty}_fraction" if empty != "train" else "")
        )
    return found


def complete_splits(given: dict[str, list[Any]], key: Callable[[Any], str], fraction: float, test: float) -> list[str]:
    """Fill in, in place, the splits that the source does not bring; return a sentence for each that was made.

    A source with a validation split and no test split has its validation split as test, because that is what others
    report; what is missing then is cut from the training split by a hash.
    """
    notes: list[str] = []
    if "test" not in given and "validation" in given:
        given["test"] = given.pop("validation")
        notes.append("the source's validation split is the test split, because it has no other with labels")
    if "validation" not in given:
        rows = split_rows([key(row) for row in given["train"]], fraction, 0.0 if "test" in given else test)
        train = given["train"]
        for name, numbers in rows.items():
            given[name] = [train[number] for number in numbers]
        notes.append(f"{' and '.join(n for n in rows if n != 'train')} split(s) cut from the training split by a hash")
    return notes


def hash_parts(*parts: bytes) -> str:
    """SHA-256 over byte strings and their lengths, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def check_size(splits: Mapping[str, Sequence[Any]], source: str) -> None:
    """Every split must hold something."""
    for name in ("train", "validation", "test"):
        if not len(splits.get(name, ())):
            raise InputError(f"{source}: the {name} split is empty; give more data, or another {name}_fraction")
