"""Words and tags of the Penn Treebank's parse trees, as its licence delivers them."""

from __future__ import annotations

import re
from pathlib import Path

from normsmith.errors import InputError

Tagged = tuple[tuple[str, ...], tuple[str, ...]]

# Sections of the Wall Street Journal, as taggers are compared on them (Collins 2002).
_LAST_SECTION = {18: "train", 21: "validation", 24: "test"}
# A leaf (a tag and a word in brackets of their own), a bracket, or the label of a node.
_PART = re.compile(r"\(\s*(?P<tag>[^\s()]+)\s+(?P<word>[^\s()]+)\s*\)|[()]|[^\s()]+")
_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LCB-": "{", "-RCB-": "}", "-LSB-": "[", "-RSB-": "]"}
_EMPTY = "-NONE-"  # tag of what was moved or left out: no word of the text


def tree_files(root: Path) -> list[Path]:
    """The parsed files of the Wall Street Journal (`wsj_0001.mrg` …) in a folder or below it, in their order."""
    return sorted((path for path in root.rglob("wsj_*.mrg") if path.is_file()), key=lambda path: path.name)


def read_trees(files: list[Path]) -> dict[str, list[Tagged]]:
    """Split name → (words, tags) of each sentence: sections 0–18 for training, 19–21 and 22–24 for the other splits.

    Raises:
        InputError: a file name without a section, a file that cannot be read, or brackets that do not match.
    """
    splits: dict[str, list[Tagged]] = {}
    for path in files:
        number = re.fullmatch(r"wsj_(\d\d)\d\d\.mrg", path.name)
        split = (
            None if number is None else next((s for last, s in _LAST_SECTION.items() if int(number[1]) <= last), None)
        )
        if split is None:
            raise InputError(f"{path}: its name tells no section; expected wsj_0001.mrg to wsj_2499.mrg")
        splits.setdefault(split, []).extend(_sentences(path))
    return splits


def _sentences(path: Path) -> list[Tagged]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    found: list[Tagged] = []
    leaves: list[tuple[str, str]] = []
    depth = 0
    for part in _PART.finditer(text):
        outside = not depth and part[0] != "("
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if outside:
            line = text.count("\n", 0, part.start()) + 1
            raise InputError(f"{path}, line {line}: {part[0]!r} stands outside of a parse tree")
        if part["tag"] not in (None, _EMPTY):
            leaves.append((_BRACKETS.get(part["word"], part["word"]), part["tag"]))
        if not depth and leaves:
            words, tags = zip(*leaves, strict=True)
            found.append((words, tags))
            leaves = []
    if depth:
        raise InputError(f"{path}: ends within a parse tree, {depth} bracket(s) are not closed")
    return found
