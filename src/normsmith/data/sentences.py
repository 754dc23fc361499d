"""Texts with one class each: lines of Python sources, TSV files, data sets of the Hub."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from normsmith.data.config import SourceConfig
from normsmith.data.examples import TaskData, check_size, complete_splits, hash_parts
from normsmith.data.facts import Facts
from normsmith.data.python_code import LINES, code_lines
from normsmith.data.sources import is_hub
from normsmith.data.words import Encoder, sequences
from normsmith.errors import InputError

Labelled = tuple[str, str]


class SentencesConfig(SourceConfig):
    """Texts to classify.

    Attributes:
        kind: `sentences`.
        source: `stdlib` (is a line of Python's own sources code, comment or docstring? no download), a folder with
            `train.tsv`, `dev.tsv` and perhaps `test.tsv`, or the name of a Hub data set (`hub:NAME` forces that).
            A TSV line is text and label in either order; a header must call the label column `label`.
        subset: configuration name of a Hub data set.
        vocab_size: tokens of the byte-level BPE that is trained on the training texts.
        sequence_length: longest text in tokens; longer ones are cut.
        max_sentences: training texts that are used.
        validation_fraction: share that decides between models, where the source has no split for that.
        test_fraction: the same for a test split.
    """

    kind: Literal["sentences"] = "sentences"
    source: str = Field(default="stdlib", min_length=1)
    subset: str | None = None
    vocab_size: int = Field(default=1024, ge=257)
    sequence_length: int = Field(default=64, ge=2)
    max_sentences: int | None = Field(default=None, ge=1)
    validation_fraction: float = Field(default=0.1, gt=0, lt=0.5)
    test_fraction: float = Field(default=0.1, gt=0, lt=0.5)

    def facts(self) -> Facts:
        """The classes of lines exactly; those of a file are not known before it is read."""
        return Facts(vocab_size=self.vocab_size, length=self.sequence_length, labels=LINES)


_CODE_LINES = 6000  # of the standard library, unless the user says otherwise


def load_sentences(config: SentencesConfig) -> TaskData:
    """Read texts and labels, split them, train a tokenizer on the training texts.

    Raises:
        InputError: no such files, a malformed line, a label that the training split has not, an empty split.
    """
    limit, notes = config.max_sentences, list[str]()
    if config.source == "stdlib":
        splits = code_lines(limit or _CODE_LINES, config.validation_fraction, config.test_fraction)
    else:
        splits = read_hub(config) if is_hub(config.source) else read_tsv(config.source)
        fractions = (config.validation_fraction, config.test_fraction)
        notes = complete_splits(splits, lambda pair: pair[0], *fractions)
    check_size(splits, config.source)
    # Of all texts: the first ones of a file that is sorted by label have one label only.
    labels = tuple(sorted({label for _, label in splits["train"]}))
    if limit is not None and limit < len(splits["train"]):
        splits["train"] = splits["train"][:limit]
        notes.append(f"only the first {limit} training texts are used")
    for name, pairs in splits.items():
        odd = next((row for row, (_, label) in enumerate(pairs) if label not in labels), None)
        if odd is not None:
            raise InputError(
                f"{config.source}: text {odd + 1} of the {name} split has the label {pairs[odd][1]!r}; "
                f"the training split has {', '.join(labels)}"
            )
    number = {label: i for i, label in enumerate(labels)}
    encoder = Encoder([text for text, _ in splits["train"]], config.vocab_size, config.sequence_length)
    examples = {
        name: sequences([encoder.line(text) for text, _ in pairs], [number[label] for _, label in pairs])
        for name, pairs in splits.items()
    }
    return TaskData(
        train=examples["train"],
        validation=examples["validation"],
        test=examples["test"],
        facts=Facts(vocab_size=encoder.vocab_size, length=config.sequence_length, labels=labels),
        data_hash=hash_parts(*("\n".join(map("\t".join, pairs)).encode() for pairs in splits.values())),
        source=config.source,
        notes=(f"{sum(map(len, splits.values())):,} texts in {len(labels)} classes", *notes),
        tokenizer=encoder.tokenizer,
    )


def read_tsv(source: str) -> dict[str, list[Labelled]]:
    """Split name → (text, label), of the TSV files in a folder.

    Raises:
        InputError: no such folder, no `train.tsv`, a line without two columns, or no column that looks like a label.
    """
    root = Path(source).expanduser()
    files = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
    if not root.is_dir() or not (root / "train.tsv").is_file():
        raise InputError(f"{source}: expected a folder with train.tsv, dev.tsv and perhaps test.tsv, or 'stdlib'")
    rows = [row for _, row in _rows(root / files["train"])]
    # Which of two columns without a header is the label shows in the largest file.
    label = None if rows and "label" in _header(rows[0]) else _label_column(rows)
    found = {split: _tsv(root / name, label) for split, name in files.items() if (root / name).is_file()}
    return {split: pairs for split, pairs in found.items() if pairs is not None}


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            read = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            return [(line, row) for line, row in enumerate(read, start=1) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as TSV ({error})") from None


def _tsv(path: Path, label: int | None) -> list[Labelled] | None:
    """The pairs of one file; None where its header has no label (the test split of GLUE).

    `label` is the label's column where no header says it; None: the one with fewer different values.
    """
    rows = _rows(path)
    header = _header(rows[0][1]) if rows else []
    if "index" in header and "label" not in header:
        return None
    if "label" in header:
        label, rows = header.index("label"), rows[1:]
    elif label is None:
        label = _label_column([row for _, row in rows])
    for line, row in rows:
        if len(row) != 2:
            raise InputError(f"{path}, line {line}: has {len(row)} column(s), expected a text and a label")
        if not row[1 - label].strip():
            raise InputError(f"{path}, line {line}: has the label {row[label]!r} and no text; remove the line")
        if not row[label].strip():
            raise InputError(f"{path}, line {line}: has no label; write one, or remove the line")
    return [(row[1 - label].strip(), row[label].strip()) for _, row in rows]


def _header(row: list[str]) -> list[str]:
    return [cell.strip().lower() for cell in row]


def _label_column(rows: list[list[str]]) -> int:
    # Of the two columns, the one with fewer different values.
    different = [len({row[column] for row in rows if len(row) == 2}) for column in (0, 1)]
    return 0 if different[0] < different[1] else 1


def read_hub(config: SentencesConfig) -> dict[str, list[Labelled]]:
    """Split name → (text, name of the label), of a Hub data set; splits without labels (−1) are left out."""
    import datasets

    name = config.source.removeprefix("hub:")
    try:
        loaded: Any = datasets.load_dataset(name, config.subset)
    except Exception as error:  # datasets raises whatever its file readers and the network raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(f"{name}: the data set cannot be read: {reason}; check the name, subset, network") from None
    found: dict[str, list[Labelled]] = {}
    for split, rows in loaded.items():
        texts = [c for c, f in rows.features.items() if getattr(f, "dtype", "") == "string"]
        labels = [c for c, f in rows.features.items() if isinstance(f, datasets.ClassLabel)]
        if len(texts) != 1 or not labels:
            raise InputError(
                f"{name}: needs one column of text and a class label, its columns are {', '.join(rows.features)}"
            )
        names, numbers = rows.features[labels[0]].names, rows[labels[0]]
        named = "validation" if split.startswith("valid") else split
        if named in ("train", "validation", "test") and min(numbers) >= 0:
            found[named] = [(text.strip(), names[number]) for text, number in zip(rows[texts[0]], numbers, strict=True)]
    if "train" not in found:
        raise InputError(f"{name}: has no split called train, only {', '.join(loaded)}")
    return found
