"""Labels that Python's own tokenizer and parser give to the sources of its standard library."""

from __future__ import annotations

import ast
import io
import keyword
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from normsmith.data.sources import Document, place, python_library

TAGS = (
    *("argument", "attribute", "call", "class", "function", "import", "keyword", "load", "method", "name", "number"),
    *("operator", "parameter", "store", "string"),
)
"""What a token of code can be; names get their role from the syntax tree."""

LINES = ("code", "comment", "docstring")
"""What a line can be."""

_FEWEST, _MOST = 24, 96  # tokens of a "sentence": whole logical lines until there are so many
_SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
_SHORTEST, _LONGEST = 16, 160  # characters of a line that is worth reading
Tagged = tuple[tuple[str, ...], tuple[str, ...]]
Line = tuple[str, str]


def tagged_code(limit: int, validation: float, test: float) -> dict[str, list[Tagged]]:
    """At most `limit` training pieces of code as (tokens, tags), and a fitting number for validation and test."""
    parts = {"train": 1 - validation - test, "validation": validation, "test": test}
    found: dict[str, list[Tagged]] = {}
    for split, documents in _modules(validation, test).items():
        wanted = max(round(limit * parts[split] / parts["train"]), 1)
        found[split] = []
        for document in documents:
            found[split] += tag_source(document.text)
            if len(found[split]) >= wanted:
                break
        found[split] = found[split][:wanted]
    return found


def code_lines(limit: int, validation: float, test: float) -> dict[str, list[Line]]:
    """At most `limit` training lines as (text, kind), each kind equally often; a text is in one split, once."""
    parts = {"train": 1 - validation - test, "validation": validation, "test": test}
    seen: set[str] = set()
    found: dict[str, list[Line]] = {}
    modules = _modules(validation, test)
    for split in ("test", "validation", "train"):
        wanted = max(round(limit * parts[split] / parts["train"] / len(LINES)), 1)
        by_kind: dict[str, list[Line]] = {kind: [] for kind in LINES}
        for document in modules[split]:
            for text, kind in lines_of(document.text):
                if text not in seen and len(by_kind[kind]) < wanted:
                    seen.add(text)
                    by_kind[kind].append((text, kind))
            if all(len(lines) == wanted for lines in by_kind.values()):
                break
        equal = zip(*by_kind.values(), strict=False)  # as many of each kind as the rarest has
        found[split] = [line for lines in equal for line in lines]
    return {name: found[name] for name in parts}


def _modules(validation: float, test: float) -> dict[str, list[Document]]:
    """The modules of each split, in an order by hash, so that the first ones are a fair sample."""
    documents = sorted(python_library(Path(sysconfig.get_path("stdlib"))), key=lambda d: place(d.key))
    found: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in documents:
        at = place(document.key)
        found["validation" if at < validation else "test" if at < validation + test else "train"].append(document)
    return found


def tag_source(source: str) -> Iterator[Tagged]:
    """Pieces of a module as (tokens, tags). Lines that are not ASCII are left out, and a module that does not parse."""
    try:
        roles = _roles(ast.parse(source))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return
    piece: list[tuple[str, str]] = []
    line: list[tuple[str, str]] = []
    before = ""
    for token in tokens:
        if token.type == tokenize.NEWLINE:
            piece += line
            line = []
            if len(piece) >= _FEWEST:
                yield _cut(piece)
                piece = []
        elif token.type not in _SKIPPED and token.string.strip() and token.line.isascii():
            line.append((" ".join(token.string.split())[:40], _tag(token, before, roles)))
        before = token.string
    if piece:
        yield _cut(piece)


def _cut(piece: list[tuple[str, str]]) -> Tagged:
    words, tags = zip(*piece[:_MOST], strict=True)
    return words, tags


def _tag(token: tokenize.TokenInfo, before: str, roles: dict[tuple[int, int], str]) -> str:
    if token.type == tokenize.NUMBER:
        return "number"
    if token.type == tokenize.OP:
        return "operator"
    if token.type != tokenize.NAME:
        return "string"  # also the parts of an f-string, which Python 3.12 gives one by one
    if keyword.iskeyword(token.string):
        return "keyword"
    if before in ("def", "class"):
        return "function" if before == "def" else "class"
    return roles.get(token.start, "name")


def _roles(tree: ast.Module) -> dict[tuple[int, int], str]:
    """(line, column) → what the name there is for. Columns count bytes, as characters do in ASCII lines."""
    roles: dict[tuple[int, int], str] = {}
    calls = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            stored = "load" if isinstance(node.ctx, ast.Load) else "store"
            roles[node.lineno, node.col_offset] = "call" if id(node) in calls else stored
        elif isinstance(node, ast.Attribute) and node.end_lineno is not None and node.end_col_offset is not None:
            place_of = (node.end_lineno, node.end_col_offset - len(node.attr))
            roles[place_of] = "method" if id(node) in calls else "attribute"
        elif isinstance(node, ast.arg):
            roles[node.lineno, node.col_offset] = "parameter"
        elif isinstance(node, ast.keyword) and node.arg is not None:
            roles[node.lineno, node.col_offset] = "argument"
        elif isinstance(node, ast.alias):
            roles[node.lineno, node.col_offset] = "import"
    return roles


def lines_of(source: str) -> Iterator[Line]:
    """Lines of a module as (text, kind), without the marks that would give the kind away (`#`, quotes)."""
    try:
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        return
    texts: list[Line] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts += [(line, "docstring") for line in (ast.get_docstring(node) or "").splitlines()]
    strings: set[int] = set()
    comments: set[int] = set()
    for token in tokens:
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
            texts.append((token.string.lstrip("#!:"), "comment"))
        elif token.start[0] != token.end[0]:
            strings |= set(range(token.start[0], token.end[0] + 1))  # a string over several lines is no line of code
    for number, line in enumerate(source.splitlines(), start=1):
        if number not in strings and number not in comments and not line.lstrip().startswith(('"', "'")):
            texts.append((line, "code"))
    for text, kind in texts:
        text = " ".join(text.split())
        if _SHORTEST <= len(text) <= _LONGEST and any(character.isalpha() for character in text):
            yield text, kind
