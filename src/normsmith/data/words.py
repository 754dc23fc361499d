"""Words and lines as token ids, with a byte-level BPE trained on the training split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from normsmith.data.examples import IGNORED, Examples
from normsmith.data.tokenizer import table_size, train_bpe, wrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_START = 0  # id of the end-of-text token, which also begins a sequence: what `pooling: cls` reads


class Encoder:
    """A tokenizer trained on the texts given, and sequences that begin with its end-of-text token."""

    def __init__(self, texts: Sequence[str], vocab_size: int, length: int) -> None:
        self.bpe = train_bpe(texts, vocab_size)
        self.length = length
        self._pieces: dict[str, list[int]] = {}  # words repeat, and encoding one costs more than looking it up

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """In transformers' form, to be saved beside a model."""
        return wrap(self.bpe)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return table_size(self.tokenizer)

    def line(self, text: str) -> list[int]:
        """The start token and the ids of a text, at most `length`."""
        return [_START, *self.bpe.encode(text, add_special_tokens=False).ids][: self.length]

    def tagged(self, words: Sequence[str], tags: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids and labels of a sentence: a word's first piece has its tag, its other pieces and the start have none."""
        ids, labels = [_START], [IGNORED]
        for word, tag in zip(words, tags, strict=True):
            if word not in self._pieces:
                self._pieces[word] = self.bpe.encode(f" {word}", add_special_tokens=False).ids
            pieces = self._pieces[word]
            ids += pieces
            labels += [tag] + [IGNORED] * (len(pieces) - 1)
        return ids[: self.length], labels[: self.length]


def sequences(ids: list[list[int]], labels: list[Any]) -> Examples:
    """Examples of token sequences, each with one label or one label per token."""
    return Examples({"input_ids": ids, "labels": labels}, finish)


def finish(row: dict[str, Any]) -> dict[str, Tensor]:
    """Ids (T,), a mask of ones (T,), and labels () or (T,), int64."""
    ids = torch.from_numpy(np.array(row["input_ids"], np.int64))
    labels = torch.from_numpy(np.array(row["labels"], np.int64))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
