"""Output folders: never written over by accident, never half a folder, never somebody else's deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from normsmith.errors import InputError

_MARK = ".normsmith"  # in every folder we made: only such a folder is ever deleted


def prepare_folder(folder: Path, overwrite: bool, resume: bool) -> None:
    """Make an output folder ready, or say why it cannot be used; nothing in it is touched unless asked for.

    Raises:
        InputError: it exists and is not empty (without `overwrite` or `resume`), was not made by normsmith, is a file,
            or cannot be written.
    """
    if overwrite and resume:
        raise InputError("--overwrite and --resume exclude each other")
    _check_free(folder, overwrite or resume, "--overwrite or --resume")
    try:
        if overwrite and folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).touch()
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error})") from None


def write_folder(folder: Path, write: Callable[[Path], None], overwrite: bool) -> None:
    """Let `write` fill a temporary folder, then rename it: `folder` appears complete or not at all.

    Raises:
        InputError: as `prepare_folder`.
    """
    _check_free(folder, overwrite, "--overwrite")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        (part / _MARK).touch()
        write(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _check_free(folder: Path, allowed: bool, flags: str) -> None:
    try:
        occupied = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder to write to")
    if occupied and not allowed:
        raise InputError(f"{folder}: exists and is not empty; choose another folder, or write {flags}")
    if occupied and not (folder / _MARK).exists():
        raise InputError(f"{folder}: was not written by normsmith, so it is not replaced; choose another folder")
