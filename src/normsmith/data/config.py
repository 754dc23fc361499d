"""What text to train on, and how it is split and tokenised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normsmith.config import Config
from normsmith.data.facts import Facts


class SourceConfig(Config):
    """What the data of every kind of task have in common; the subclasses say what the fields mean for them."""

    kind: str
    source: str
    validation_fraction: float = Field(default=0.1, gt=0, lt=0.5)
    test_fraction: float = Field(default=0.1, ge=0, lt=0.5)

    def facts(self) -> Facts:
        """What a model must know of the data, as far as it is known before they are read."""
        raise NotImplementedError(f"{type(self).__name__} must define facts()")


class DataConfig(SourceConfig):
    """Text for a language model: source, split and tokenizer.

    Attributes:
        kind: `text`.
        source: `stdlib` (Python sources of the running interpreter, no download), a text file, a folder, or the name
            of a Hugging Face Hub data set; `hub:NAME` forces the last one, also for a local folder in a form that
            `datasets` can load. A folder with files named after splits (`wiki.train.tokens`, `valid.txt`) keeps them.
        subset: configuration name of a Hub data set.
        split: split of a Hub data set.
        text_column: key of the text in JSON lines and in Hub rows.
        max_documents: stop after this many documents.
        max_characters: stop after the document that reaches this many characters. A Hub data set without either limit
            stops after `sources.HUB_CHARACTERS`, because streaming would not end.
        validation_fraction: expected share of documents in the validation split, for a source without its own.
        test_fraction: the same for a third split, taken from the training documents; 0 for none.
        vocab_size: tokens of the byte-level BPE that is trained, 256 bytes and the end-of-text token included.
        tokenizer: folder of a saved transformers tokenizer, used instead of training one; `vocab_size` is then ignored.
        sequence_length: tokens per window.
    """

    kind: Literal["text"] = "text"
    source: str = Field(default="stdlib", min_length=1)
    subset: str | None = None
    split: str = "train"
    text_column: str = "text"
    max_documents: int | None = Field(default=None, ge=2)
    max_characters: int | None = Field(default=None, ge=1)
    validation_fraction: float = Field(default=0.05, gt=0, lt=0.5)
    test_fraction: float = Field(default=0.0, ge=0, lt=0.5)
    vocab_size: int = Field(default=4096, ge=257)
    tokenizer: str | None = None
    sequence_length: int = Field(default=256, ge=2)

    def facts(self) -> Facts:
        """The vocabulary; a text with too few pairs to merge gives a smaller one."""
        return Facts(vocab_size=self.vocab_size, length=self.sequence_length)
