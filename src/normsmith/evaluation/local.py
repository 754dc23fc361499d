"""Benchmarks in local files: find them, read them, say which line is wrong."""

from __future__ import annotations

import bz2
import hashlib
import importlib
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml

from normsmith.errors import InputError, UnknownNameError

Item = dict[str, Any]

_TASKS = resources.files("normsmith.evaluation") / "tasks"
_ENDINGS = 4  # HellaSwag's text form: context, number of the right ending, four endings
_TITLE = re.compile(r"^ = (?!=).*(?<!=) =\s*$")  # of an article; sections have more equals signs


def local_tasks() -> list[str]:
    """Names of the benchmarks that can be read from local files."""
    files = (path.name for path in _TASKS.iterdir())
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml") and name[0] != "_")


def task_config(task: str) -> dict[str, Any]:
    """The task file of a local benchmark, without the file that it reads.

    Raises:
        UnknownNameError: there is none; the nearest names are given.
    """
    if task not in local_tasks():
        raise UnknownNameError("task", task, local_tasks())
    config: dict[str, Any] = yaml.safe_load((_TASKS / f"{task}.yaml").read_text("utf-8"))
    if base := config.pop("include", None):
        config = yaml.safe_load((_TASKS / base).read_text("utf-8")) | config
    return config


def find_file(task: str, folder: Path) -> Path | None:
    """The benchmark's file in `folder` or in a folder directly below it; None if there is none."""
    names = task_config(task)["metadata"]["files"]
    places = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


def read_items(task: str, path: Path) -> list[Item]:
    """The items of a benchmark.

    Raises:
        InputError: the file cannot be read, is empty, or a line is not an item; the line's number is given.
    """
    form: str = task_config(task)["metadata"]["format"]
    lines = _lines(path)
    if ".jsonl" in path.suffixes:
        items = [_parse(path, number, line, form) for number, line in enumerate(lines, 1) if line.strip()]
    elif form == "pages":
        items = _pages(lines)
    else:
        items = _groups(path, lines)
    if not items:
        raise InputError(f"{path}: holds no item of {task}")
    return items


def write_items(items: list[Item], path: Path) -> None:
    """Write items as JSONL."""
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")


def file_hash(path: Path) -> str:
    """SHA-256 of the file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wikitext_functions() -> dict[str, Callable[..., Any]]:
    """How lm-eval lays WikiText's tokens out as text and counts words: theirs, so that numbers compare."""
    module = importlib.import_module("lm_eval.tasks.wikitext.preprocess_wikitext")
    return {"doc_to_target": module.wikitext_detokenizer, "process_results": module.process_results}


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        text = (bz2.decompress(data) if path.suffix == ".bz2" else data).decode("utf-8")
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read as text ({error})") from None
    return text.split("\n")  # not splitlines: texts contain other characters that count as line ends


def _parse(path: Path, number: int, line: str, form: str) -> Item:
    where = f"{path}, line {number}"
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: is not JSON ({error.msg} at character {error.pos + 1})") from None
    wanted = {
        "choices": {"query": str, "choices": list, "gold": int},
        "contexts": {"context_options": list, "continuation": str, "gold": int},
        "continuation": {"context": str, "continuation": str},
        "pages": {"page": str},
    }[form]
    if not isinstance(item, dict):
        raise InputError(f"{where}: is a {type(item).__name__}, expected an object with the keys {', '.join(wanted)}")
    item = cast("Item", item)
    for key, kind in wanted.items():
        value = item.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or value in ("", []):
            raise InputError(f"{where}: {key!r} must be a {kind.__name__} that is not empty, is {value!r}")
    options: list[Any] = item.get("choices") or item.get("context_options") or []
    if options and not all(isinstance(option, str) and option for option in options):
        raise InputError(f"{where}: holds a choice that is no text")
    if options and not 0 <= item["gold"] < len(options):
        raise InputError(f"{where}: 'gold' is {item['gold']}, but there are {len(options)} choices (the first is 0)")
    return {key: item[key] for key in wanted}


def _groups(path: Path, lines: list[str]) -> list[Item]:
    """HellaSwag as text: six lines per item."""
    while lines and not lines[-1].strip():
        lines.pop()
    size, items = _ENDINGS + 2, list[Item]()
    for start in range(0, len(lines), size):
        item = lines[start : start + size]
        if len(item) != size or item[1].strip() not in {str(i) for i in range(_ENDINGS)}:
            raise InputError(
                f"{path}, line {start + 1}: an item is a context, the number of the right ending (0 to "
                f"{_ENDINGS - 1}) and {_ENDINGS} endings, a line each"
            )
        query, gold, *endings = (line.strip() for line in item)
        items.append({"query": query, "choices": endings, "gold": int(gold)})
    return items


def _pages(lines: list[str]) -> list[Item]:
    """WikiText's articles: each begins with a title between single equals signs."""
    pages: list[list[str]] = []
    for line in lines:
        if _TITLE.match(line) or not pages:
            pages.append([])
        pages[-1].append(line)
    return [{"page": "\n".join(page)} for page in pages if any(line.strip() for line in page)]
