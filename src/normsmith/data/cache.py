"""Folders that are built once: complete or absent, whoever is interrupted and however many processes build."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from normsmith.errors import InputError

_CHECKSUMS = "checksums.json"


def cache_root() -> Path:
    """`NORMSMITH_CACHE`, else the user's cache folder."""
    return Path(os.environ.get("NORMSMITH_CACHE") or platformdirs.user_cache_dir("normsmith"))


def cached_folder(
    kind: str, key: Mapping[str, object], build: Callable[[Path], None], say: Callable[[str], None]
) -> Path:
    """Return the folder that `build(folder)` fills with files for `key`, from the cache where it is intact.

    A damaged folder is built again. `InputError` where the cache cannot be written.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    entry = cache_root() / kind / digest[:32]
    if _intact(entry):
        say(f"using the cached folder {entry}")
        return entry
    if entry.exists():
        say(f"the cached folder {entry} is damaged, building it again")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=entry.parent) as temporary:
            folder = Path(temporary) / "entry"
            folder.mkdir()
            build(folder)
            checksums = {path.name: _checksum(path) for path in sorted(folder.iterdir())}
            (folder / _CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
            _publish(folder, entry)
    except OSError as error:
        raise InputError(
            f"{entry.parent}: the cache cannot be written ({error.strerror or error}); "
            "set NORMSMITH_CACHE to another folder"
        ) from None
    return entry


def _publish(folder: Path, entry: Path) -> None:
    # A folder cannot replace one with files in it: a damaged one moves away first, an intact one is another process's.
    try:
        if entry.exists() and not _intact(entry):
            entry.replace(folder.with_name("damaged"))
        folder.replace(entry)
    except OSError:
        if not _intact(entry):
            raise


def _intact(entry: Path) -> bool:
    try:
        checksums = json.loads((entry / _CHECKSUMS).read_text(encoding="utf-8"))
        return all(_checksum(entry / name) == expected for name, expected in checksums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
