"""Sentences with one tag per word: roles of tokens in Python code, and files in CoNLL-U."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from normsmith.data.config import SourceConfig
from normsmith.data.examples import IGNORED, TaskData, check_size, complete_splits, hash_parts
from normsmith.data.facts import Facts
from normsmith.data.python_code import TAGS, tagged_code
from normsmith.data.treebank import read_trees, tree_files
from normsmith.data.words import Encoder, sequences
from normsmith.errors import InputError

_HEADERS = (["FORM", "UPOS"], ["FORM", "TAG"])  # of a .tsv, by the names that its columns have


class Sentence(NamedTuple):
    """Words and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


class TaggingConfig(SourceConfig):
    """Sentences with one tag per word.

    Attributes:
        kind: `tagging`.
        source: `stdlib` (the role of every token in the Python sources of this interpreter, no download), or a folder
            with files called …train…, …dev… and …test… (`.conllu`, or `.tsv` with the columns FORM UPOS XPOS or FORM
            TAG; also `.gz`), or with the Penn Treebank's `wsj_*.mrg`, whose sections are split as usual.
        tags: `upos` (universal) or `xpos` (of the language: for English the Penn Treebank's), where there are two.
        vocab_size: tokens of the byte-level BPE that is trained on the training words.
        sequence_length: longest sentence in tokens; of longer ones the last words are left out, also in the accuracy.
        max_sentences: training sentences that are used.
        validation_fraction: share that decides between models, where the source has no split for that.
        test_fraction: the same for a test split.
    """

    kind: Literal["tagging"] = "tagging"
    source: str = Field(default="stdlib", min_length=1)
    tags: Literal["upos", "xpos"] = "upos"
    vocab_size: int = Field(default=1024, ge=257)
    sequence_length: int = Field(default=128, ge=2)
    max_sentences: int | None = Field(default=None, ge=1)
    validation_fraction: float = Field(default=0.1, gt=0, lt=0.5)
    test_fraction: float = Field(default=0.1, gt=0, lt=0.5)

    def facts(self) -> Facts:
        """The tags of code exactly; those of a file are not known before it is read."""
        return Facts(vocab_size=self.vocab_size, length=self.sequence_length, labels=TAGS)


_CODE_SENTENCES = 4000  # of the standard library, unless the user says otherwise: about a quarter of it


def load_tagging(config: TaggingConfig) -> TaskData:
    """Read sentences, split them, train a tokenizer on the training words.

    Raises:
        InputError: no such files, a malformed line, a tag that only some splits have, an empty split.
    """
    limit, notes = config.max_sentences, list[str]()
    if config.source == "stdlib":
        found = tagged_code(limit or _CODE_SENTENCES, config.validation_fraction, config.test_fraction)
        splits = {name: [Sentence(*pair) for pair in pairs] for name, pairs in found.items()}
    else:
        splits = read_tagged(config.source, config.tags)
        fractions = (config.validation_fraction, config.test_fraction)
        notes = complete_splits(splits, lambda sentence: " ".join(sentence.words), *fractions)
    check_size(splits, config.source)
    tags = _tag_set(splits, config.source)  # of all sentences: a rare tag may be in none of the first ones
    if limit is not None and limit < len(splits["train"]):
        splits["train"] = splits["train"][:limit]
        notes.append(f"only the first {limit} training sentences are used")
    number = {tag: i for i, tag in enumerate(tags)}
    encoder = Encoder([" " + " ".join(s.words) for s in splits["train"]], config.vocab_size, config.sequence_length)
    examples = {
        name: sequences(*_columns([encoder.tagged(s.words, [number[t] for t in s.tags]) for s in sentences]))
        for name, sentences in splits.items()
    }
    texts = ("\n".join("\t".join((*s.words, *s.tags)) for s in sentences) for sentences in splits.values())
    words = {name: sum(len(s.words) for s in sentences) for name, sentences in splits.items()}
    read = {
        name: sum(int((np.array(row) != IGNORED).sum()) for row in e.columns["labels"]) for name, e in examples.items()
    }
    notes += [
        f"{words[name] - read[name]:,} of {words[name]:,} {name} words lie beyond sequence_length and do not count"
        for name in words
        if words[name] > read[name]
    ]
    return TaskData(
        train=examples["train"],
        validation=examples["validation"],
        test=examples["test"],
        facts=Facts(vocab_size=encoder.vocab_size, length=config.sequence_length, labels=tags),
        data_hash=hash_parts(*(text.encode() for text in texts)),
        source=config.source,
        notes=(f"{sum(words.values()):,} words in {sum(map(len, splits.values())):,} sentences", *notes),
        tokenizer=encoder.tokenizer,
    )


def _columns(pairs: list[tuple[list[int], list[int]]]) -> tuple[list[list[int]], list[list[int]]]:
    return [ids for ids, _ in pairs], [labels for _, labels in pairs]


def _tag_set(splits: dict[str, list[Sentence]], source: str) -> tuple[str, ...]:
    counted = {name: Counter(itertools.chain(*(s.tags for s in found))) for name, found in splits.items()}
    known = counted["train"]
    for name, counts in counted.items():
        for row, sentence in enumerate(splits[name]):
            for word, tag in zip(sentence.words, sentence.tags, strict=True):
                if tag not in known:
                    raise InputError(
                        f"{source}: sentence {row + 1} of the {name} split tags {word!r} as {tag!r}, a tag that the "
                        f"training split has not ({counts[tag]} time(s)); the splits must share one tag set"
                    )
    return tuple(sorted(known))


def read_tagged(source: str, tags: str) -> dict[str, list[Sentence]]:
    """Split name → sentences, of the files in a folder whose names tell their split."""
    root = Path(source).expanduser()
    if not root.is_dir():
        raise InputError(
            f"{source}: no such folder; tagging reads 'stdlib', or a folder of .conllu, .tsv or wsj_*.mrg files"
        )
    if trees := tree_files(root):
        return {name: [Sentence(*pair) for pair in pairs] for name, pairs in read_trees(trees).items()}
    kinds = {"train": "train", "dev": "validation", "valid": "validation", "test": "test"}
    splits: dict[str, list[Sentence]] = {}
    for path in sorted(root.iterdir()):
        name = path.name.lower().removesuffix(".gz")
        split = next((kind for word, kind in kinds.items() if word in name), None)
        if split is None or not name.endswith((".conllu", ".tsv")):
            continue
        if split in splits:
            raise InputError(f"{source}: has two files for the {split} split, the second is {path.name}")
        splits[split] = list(_sentences(path, name.endswith(".conllu"), tags))
    if "train" not in splits:
        raise InputError(f"{source}: has no .conllu or .tsv file with 'train' in its name")
    return splits


def _sentences(path: Path, conllu: bool, tags: str) -> Iterator[Sentence]:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = data.decode("utf-8-sig").split("\n")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    word, upos = (1, 3) if conllu else (0, 1)
    column = upos + (tags == "xpos")
    words: list[tuple[str, str]] = []
    for number, line in enumerate([*lines, ""], start=1):
        cells = line.rstrip("\r").split("\t")
        if not line.strip():
            if words:
                yield Sentence(*zip(*words, strict=True))
            words = []
        elif number == 1 and not conllu and cells[:2] in _HEADERS:
            continue
        elif conllu and (line.startswith("#") or "-" in cells[0] or "." in cells[0]):
            continue  # a comment; a multiword token, whose parts follow; a word that is not in the text
        elif (
            len(cells) not in ((10,) if conllu else (2, 3)) or not cells[word] or not cells[min(column, len(cells) - 1)]
        ):
            expected = "10 columns (CoNLL-U)" if conllu else "the columns FORM UPOS XPOS, or FORM TAG"
            raise InputError(f"{path}, line {number}: has {len(cells)} column(s) or an empty one, expected {expected}")
        elif (tag := cells[min(column, len(cells) - 1)]) == "_":
            other = "upos" if tags == "xpos" else "xpos"
            raise InputError(f"{path}, line {number}: {cells[word]!r} has no {tags}; write tags: {other}")
        else:
            words.append((cells[word], tag))
