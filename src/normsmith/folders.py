"""Output folders: never written over by accident, never half a folder, never somebody else's deleted."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from normsmith.errors import InputError

_MARK = ".normsmith"  # in every folder we made: only such a folder is ever deleted


def check_folder(folder: Path, overwrite: bool, resume: bool | None = None) -> None:
    """Say whether an output folder can be used, before anything is computed for it; changes nothing.

    Args:
        folder: where the output shall go.
        overwrite: its contents may be replaced.
        resume: its contents may be continued; None where that is not possible at all.

    Raises:
        InputError: it exists and is not empty (without `overwrite` or `resume`), was not made by normsmith, is a file,
            would replace the current folder, or cannot be written.
    """
    if overwrite and resume:
        raise InputError("--overwrite and --resume exclude each other")
    try:
        occupied = folder.is_dir() and any(folder.iterdir())
        above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder to write to")
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "no permission to write to" if above.is_dir() else "not a folder:"
        raise InputError(f"{folder}: cannot be written ({reason} {above})")
    if occupied and not (overwrite or resume):
        flags = "--overwrite" if resume is None else "--overwrite or --resume"
        raise InputError(f"{folder}: exists and is not empty; choose another folder, or write {flags}")
    if occupied and not (folder / _MARK).exists():
        raise InputError(f"{folder}: was not written by normsmith, so it is not replaced; choose another folder")
    if overwrite:
        _check_replaceable(folder)


def check_output(source: Path, output: Path, overwrite: bool) -> None:
    """Say whether a model made from `source` can be written to `output`; changes nothing.

    Raises:
        InputError: `output` is not empty (without `overwrite`), is `source`, lies inside it or holds it, or cannot be
            written.
    """
    there, here = output.resolve(), source.resolve()
    if there == here or here in there.parents:
        raise InputError(f"{output}: lies inside the input {source}; choose a folder outside")
    if there in here.parents and (source.exists() or overwrite):
        raise InputError(f"{output}: holds the input {source}, which must not be replaced; choose another folder")
    check_folder(output, overwrite)


def prepare_folder(folder: Path, overwrite: bool, resume: bool | None = None) -> None:
    """Make an output folder ready, or say why it cannot be used; nothing in it is touched unless asked for.

    Raises:
        InputError: as `check_folder`.
    """
    check_folder(folder, overwrite, resume)
    try:
        if overwrite and folder.exists():
            # Renaming first: an interruption then never leaves half of the old contents under the old name.
            _sweep(folder)
            gone = _hidden(folder, "gone")
            folder.resolve().replace(gone)
            shutil.rmtree(gone)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).touch()
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error})") from None


def write_folder(folder: Path, write: Callable[[Path], None], overwrite: bool) -> None:
    """Let `write` fill a temporary folder, then rename it: `folder` appears complete or not at all.

    Raises:
        InputError: as `check_folder`.
    """
    check_folder(folder, overwrite)
    _check_replaceable(folder)
    target, part, old = folder.resolve(), _hidden(folder, "part"), _hidden(folder, "old")
    try:
        _sweep(folder)
        part.mkdir(parents=True)
        (part / _MARK).touch()
        write(part)
        if target.exists():
            target.replace(old)
        part.replace(target)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        if old.exists() and not target.exists():
            old.replace(target)
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)


def _hidden(folder: Path, role: str) -> Path:
    folder = folder.resolve()  # `a/..` has no name of its own
    return folder.with_name(f".{folder.name}.{os.getpid()}.{role}")


def _sweep(folder: Path) -> None:
    """Delete what killed processes that were writing this folder left beside it; it may be large.

    Where one was killed between its two renamings, the earlier contents go back to their place first.
    """
    folder = folder.resolve()
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        number, _, role = path.name.removeprefix(f".{folder.name}.").partition(".")
        if role not in ("part", "old", "gone") or not number.isdecimal():
            continue
        if int(number) == os.getpid() or not _runs(int(number)):
            if role == "old" and not folder.exists() and (path / _MARK).exists():
                path.replace(folder)
            shutil.rmtree(path, ignore_errors=True)


def _runs(number: int) -> bool:
    if os.name != "posix":  # elsewhere os.kill would end the process that we ask for
        return True
    try:
        os.kill(number, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _check_replaceable(folder: Path) -> None:
    here = Path.cwd()
    if folder.resolve() in (here, *here.parents):
        raise InputError(f"{folder}: is or holds the current folder, so it cannot be replaced; choose another folder")
