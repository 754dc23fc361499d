"""Where documents come from: the standard library, files, folders, the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from normsmith.data.config import DataConfig
from normsmith.data.tokenizer import END_OF_TEXT
from normsmith.errors import InputError

HUB_CHARACTERS = 20_000_000
"""Limit of a Hub data set for which the user sets none: about five million tokens."""

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".raw", ".tokens")  # the last two: WikiText

_NOT_LIBRARY = frozenset(
    {
        *("site-packages", "dist-packages", "__pycache__", "test", "tests"),
        *("idlelib", "turtledemo"),  # an application and demos
        *("encodings", "pydoc_data"),  # mostly generated tables
        *("lib2to3", "distutils"),  # gone in later versions of Python
    }
)
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_PIECE = (2048, 8192)  # characters: fewest before a blank line ends the piece, most in any case
_SPLIT_FILE = re.compile(r"(?:.*[._-])?(train|valid|validation|val|dev|test)\.(?:txt|jsonl|raw|tokens)", re.IGNORECASE)
_SPLITS = {"train": "train", "test": "test"}  # every other word means validation


class Document(NamedTuple):
    """One document.

    Attributes:
        name: what it is called in hashes and messages.
        text: its characters.
        key: decides its split: the path of a file, the text itself of what has no lasting name.
        split: the split that its source puts it into, which then decides instead of `key`; empty for none.
    """

    name: str
    text: str
    key: str
    split: str = ""


def read_documents(config: DataConfig) -> list[Document]:
    """Read the documents of `config.source` in a fixed order, without blank ones, up to the configured limits.

    A folder gives one document per `.txt`, `.md` or `.py` file and one per line of a `.jsonl` file, by sorted path,
    hidden files left out. One whose files are named after splits (see `own_splits`) gives those files alone, and the
    limits then are of its training text. `<|endoftext|>` separates documents in a single file and in the `.txt` files
    of a folder. A single file without it is cut at blank lines into pieces of at least 2048 characters (at most 8192
    where blank lines are rare), so that both splits get some. What cannot be read as text raises `InputError`.
    """
    documents = list(_limited(_documents(config), config))
    if not documents:
        raise InputError(f"{config.source}: has no text, it is empty or blank")
    return documents


def hash_documents(documents: Iterable[Document]) -> str:
    """SHA-256 over names and contents, in order, as hexadecimal digits."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name.encode("utf-8", "surrogateescape"), document.text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def split_documents(
    documents: list[Document], fraction: float, sides: str = "training and validation"
) -> tuple[list[Document], list[Document]]:
    """Split into (train, validation) by a hash of each key, so that documents added later move none.

    Equal keys share a side. A side that would be empty gets the key nearest to the border; `InputError` where all keys
    are equal, with `sides` as what needs one each.
    """
    places = [place(document.key) for document in documents]
    low, high = min(places), max(places)
    if low == high:
        found = "there is only one document" if len(documents) == 1 else f"all {len(documents)} documents are equal"
        raise InputError(f"{found}, but {sides} need one each: give more text")
    border = min(max(fraction, low), max(p for p in places if p < high))
    train = [d for d, p in zip(documents, places, strict=True) if p > border]
    return train, [d for d, p in zip(documents, places, strict=True) if p <= border]


def split_for(documents: list[Document], config: DataConfig) -> dict[str, list[Document]]:
    """The splits that `config` asks for, by name: `train`, `validation` and, with a `test_fraction`, `test`.

    The validation split is the same with and without a test split, which is the next part of the hash range. A source
    that brings its own splits keeps them, whatever the fractions.

    Raises:
        InputError: a side would be empty, or a source with its own splits has none for training or for validation.
    """
    if any(document.split for document in documents):
        found = {name: [d for d in documents if d.split == name] for name in ("train", "validation", "test")}
        for name, word in (("train", "train"), ("validation", "valid")):
            if not found[name]:
                there = ", ".join(dict.fromkeys(d.name.split(":")[0].split("#")[0] for d in documents))
                raise InputError(
                    f"{config.source}: its files are named after splits ({there}) and none has text for {name}; add "
                    f"one called *.{word}.txt, or give a single file as source"
                )
        return {name: split for name, split in found.items() if split}
    train, validation = split_documents(documents, config.validation_fraction)
    if not config.test_fraction:
        return {"train": train, "validation": validation}
    border = config.validation_fraction + config.test_fraction
    train, test = split_documents(train, border, "training, validation and test")
    return {"train": train, "validation": validation, "test": test}


def place(key: str) -> float:
    """Where in [0, 1) the hash of a key lies: the same on every machine, for ever."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _limited(documents: Iterator[Document], config: DataConfig) -> Iterator[Document]:
    count = characters = 0
    limit = config.max_characters
    if limit is None and config.max_documents is None and is_hub(config.source):
        limit = HUB_CHARACTERS
    for document in documents:
        if not document.text.strip():
            continue
        yield document
        if document.split in ("validation", "test"):
            continue
        count, characters = count + 1, characters + len(document.text)
        if count == config.max_documents or (limit is not None and characters >= limit):
            return


def is_hub(source: str) -> bool:
    """Whether `source` is read through `datasets`: it has the prefix `hub:`, or is neither `stdlib` nor a path here."""
    return source.startswith("hub:") or (source != "stdlib" and not _exists(source))


def _exists(source: str) -> bool:
    try:
        return Path(source).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long for the file system, a NUL in it, the home of nobody
        return False


def _documents(config: DataConfig) -> Iterator[Document]:
    source = config.source
    if source == "stdlib":
        return python_library(Path(sysconfig.get_path("stdlib")))
    if not is_hub(source):
        path = Path(source).expanduser()
        if path.is_dir():
            return _folder(path, config.text_column)
        if not path.is_file():
            raise InputError(f"{source}: is neither a regular file nor a folder")
        return _file(path, path.name, config.text_column, cut=True)
    if source.startswith("hub:"):
        return _hub(source.removeprefix("hub:"), config, "the data set")
    if source.lower().endswith(SUFFIXES) or not _HUB_NAME.fullmatch(source):
        raise InputError(
            f"{source}: no such file or folder, and no name of a Hub data set (OWNER/NAME) either; "
            "give a path that exists, a Hub name, or 'stdlib'"
        )
    return _hub(source, config, "no such file or folder here, and the Hub data set")


def python_library(root: Path) -> Iterator[Document]:
    """The library modules under `root`, one document each, named by relative path; `InputError` where there are none.

    Left out are tests, demos, generated tables and installed packages, so that every machine with this Python has the
    same documents (about 8 million characters).
    """
    # _sysconfigdata_*.py records the machine that built Python; sitecustomize.py is the distribution's.
    machine = ("_sysconfigdata", "sitecustomize")
    names = _walk(root, (".py",), lambda name: name in _NOT_LIBRARY or name.startswith(machine))
    if not names:
        raise InputError(
            f"this Python ({sys.executable}) ships no sources of its standard library in {root}; "
            "give a text file, a folder or a Hub data set as source"
        )
    return (Document(name, _read(root / name), name) for name in names)


def _folder(root: Path, column: str) -> Iterator[Document]:
    names = _walk(root, SUFFIXES, lambda name: name.startswith("."))
    if not names:
        raise InputError(f"{root}: has no text files; normsmith reads {', '.join(SUFFIXES)}")
    own = own_splits(root, names)
    return (
        document._replace(split=own.get(name, ""))
        for name in own or names
        for document in _file(root / name, name, column, cut=False)
    )


def own_splits(root: Path, names: Iterable[str]) -> dict[str, str]:
    """File → split, for a folder that brings its own: at least two of them, in files named as `wiki.train.tokens`.

    The words are train, valid (validation, val, dev) and test, alone or behind `.`, `-` or `_`, before `.txt`,
    `.jsonl`, `.raw` or `.tokens`. What is trained on comes last, because limits end the reading. Other folders: {}.

    Raises:
        InputError: the same text in two versions, as `wiki.test.raw` and `wiki.test.tokens`.
    """
    top = (name for name in names if "/" not in name)
    words = {name: found[1].lower() for name in top if (found := _SPLIT_FILE.fullmatch(name))}
    own = {name: _SPLITS.get(word, "validation") for name, word in words.items()}
    if len(set(own.values())) < 2:
        return {}
    versions: dict[str, str] = {}
    for name in own:
        other = versions.setdefault(Path(name).stem, name)
        if other != name:
            raise InputError(f"{root}: {other} and {name} are two versions of one text; keep one, or give it as source")
    order = ("test", "validation", "train")
    return dict(sorted(own.items(), key=lambda item: order.index(item[1])))


def _walk(root: Path, suffixes: tuple[str, ...], skip: Callable[[str], bool]) -> list[str]:
    """Sorted relative paths of the files with these suffixes; what `skip` says of a name holds for folders too."""
    names: list[str] = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not skip(name)]
        paths = [Path(parent, name) for name in files if not skip(name) and name.lower().endswith(suffixes)]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return sorted(names)


def _file(path: Path, name: str, column: str, *, cut: bool) -> Iterator[Document]:
    text = _read(path)
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        yield from _json_lines(path, name, text, column)
    elif END_OF_TEXT in text and (cut or suffix == ".txt"):
        for i, part in enumerate(text.split(END_OF_TEXT)):
            yield Document(f"{name}#{i}", part.strip("\n"), part.strip("\n"))
    elif cut:
        for i, piece in enumerate(_pieces(text)):
            yield Document(f"{name}#{i}", piece, piece)
    else:
        yield Document(name, text, name)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if (nul := data.find(0)) >= 0:
        raise InputError(f"{path}: byte {nul} is NUL, so this is a binary or UTF-16 file; expected text in UTF-8")
    encoding = "utf-8"
    try:
        if path.suffix == ".py":  # Python sources may declare their encoding in a comment
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0].removesuffix("-sig")
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not valid {encoding.upper()}; expected text") from None
    except SyntaxError as error:
        raise InputError(f"{path}: cannot be decoded as Python source ({error.msg})") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _pieces(text: str) -> Iterator[str]:
    fewest, most = _PIECE
    start = 0
    while start < len(text):
        blank = _BLANK_LINES.search(text, start + fewest, start + most)
        if blank:
            end = blank.end()
        elif start + most >= len(text):
            end = len(text)
        else:
            end = text.rfind("\n", start + fewest, start + most) + 1 or start + most
        yield text[start:end]
        start = end


def _json_lines(path: Path, name: str, text: str, column: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: expected a JSON object, found {type(row).__name__}")
        value = _column(cast("dict[str, Any]", row), column, f"{path}, line {number}")
        yield Document(f"{name}:{number}", value, value)


def _column(row: Mapping[str, Any], column: str, where: str) -> str:
    if column not in row:
        raise InputError(f"{where}: no key {column!r}, found {sorted(row)}; set text_column to the one with the text")
    value = row[column]
    if not isinstance(value, str):
        raise InputError(f"{where}: {column!r} holds {type(value).__name__}, expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no text
        raise InputError(f"{where}: character {error.start} of {column!r} is half a surrogate pair") from None
    return value


def _hub(name: str, config: DataConfig, what: str) -> Iterator[Document]:
    import datasets

    try:
        rows = datasets.load_dataset(name, config.subset, split=config.split, streaming=True)
        for i, row in enumerate(rows):
            text = _column(cast("Mapping[str, Any]", row), config.text_column, f"{name}, row {i}")
            yield Document(str(i), text, text)
    except InputError:
        raise
    except Exception as error:  # datasets raises whatever its file readers and the network raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(
            f"{name}: {what} cannot be read: {reason}; check the name, the subset, the split, the network"
        ) from None
