"""Output folders: whole or absent, never somebody else's, never the current one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from normsmith.errors import InputError
from normsmith.studies import check_folder, prepare_folder, write_folder


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else "/" for p in sorted(folder.rglob("*"))}


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep/file").write_text(text)

    return write


def test_a_written_folder_appears_whole_and_is_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "new/parents/out"
    write_folder(out, writer("one"), overwrite=False)
    assert tree(out) == {".normsmith": "", "deep": "/", "deep/file": "one"}
    (out / "extra").touch()
    with pytest.raises(InputError, match="exists and is not empty; choose another folder, or write --overwrite$"):
        write_folder(out, writer("two"), overwrite=False)
    assert tree(out)["deep/file"] == "one"
    write_folder(out, writer("two"), overwrite=True)
    assert tree(out.parent) == {"out": "/", "out/.normsmith": "", "out/deep": "/", "out/deep/file": "two"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("existing", [False, True])
def test_a_writer_that_fails_leaves_what_was_there(existing: bool, error: BaseException, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if existing:
        write_folder(out, writer("old"), overwrite=False)
    before = tree(tmp_path)

    def fails(folder: Path) -> None:
        writer("new")(folder)
        raise error

    expected = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="No space left|boom|"):
        write_folder(out, fails, overwrite=existing)
    assert tree(tmp_path) == before


def test_an_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_folder(out, writer("old"), overwrite=False)
    before = tree(tmp_path)

    def vanishes(folder: Path) -> None:
        (folder / ".normsmith").unlink()
        folder.rmdir()

    with pytest.raises(InputError, match="out: cannot be written"):
        write_folder(out, vanishes, overwrite=True)
    assert tree(tmp_path) == before


def test_the_part_folder_of_a_killed_process_is_in_nobodys_way(tmp_path: Path) -> None:
    left = tmp_path / f".out.{os.getpid()}.part"
    left.mkdir()
    (left / "half").write_text("half")
    write_folder(tmp_path / "out", writer("one"), overwrite=False)
    assert tree(tmp_path) == {"out": "/", "out/.normsmith": "", "out/deep": "/", "out/deep/file": "one"}


def test_what_a_killed_process_had_moved_away_comes_back(tmp_path: Path) -> None:
    out, left = tmp_path / "out", tmp_path / f".out.{os.getpid()}.old"
    write_folder(out, writer("earlier"), overwrite=False)
    out.replace(left)  # killed between its two renamings
    with pytest.raises(RuntimeError):
        write_folder(out, fails_at_once, overwrite=False)
    assert tree(out)["deep/file"] == "earlier"
    out.rename(left)
    write_folder(out, writer("new"), overwrite=True)
    assert tree(tmp_path) == {"out": "/", "out/.normsmith": "", "out/deep": "/", "out/deep/file": "new"}
    (tmp_path / f".out.{os.getpid()}.gone").mkdir()  # killed while the contents were deleted
    prepare_folder(out, overwrite=True)
    assert tree(tmp_path) == {"out": "/", "out/.normsmith": ""}


def fails_at_once(folder: Path) -> None:
    raise RuntimeError("boom")


def test_prepare_makes_marks_empties_and_keeps(tmp_path: Path) -> None:
    out = tmp_path / "a/b"
    prepare_folder(out, overwrite=False)
    assert tree(tmp_path) == {"a": "/", "a/b": "/", "a/b/.normsmith": ""}
    (out / "result").write_text("1")
    prepare_folder(out, overwrite=False, resume=True)
    assert (out / "result").read_text() == "1"
    prepare_folder(out, overwrite=True)
    assert tree(tmp_path) == {"a": "/", "a/b": "/", "a/b/.normsmith": ""}


@pytest.mark.parametrize(
    ("overwrite", "resume", "message"),
    [
        (False, None, "exists and is not empty; choose another folder, or write --overwrite$"),
        (False, False, "exists and is not empty; choose another folder, or write --overwrite or --resume$"),
        (True, None, "was not written by normsmith"),
        (False, True, "was not written by normsmith"),
        (True, True, "--overwrite and --resume exclude each other"),
    ],
)
def test_a_foreign_folder_is_refused(overwrite: bool, resume: bool | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for check in (check_folder, prepare_folder):
        with pytest.raises(InputError, match=message):
            check(tmp_path, overwrite, resume)
    assert tree(tmp_path) == {"notes": "mine"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "is a file, expected a folder"),
        ("file/out", "cannot be written .not a folder: .*file"),
        ("/proc/normsmith/out", "cannot be written"),
        ("n" * 300, "(?i)name too long"),
    ],
)
def test_a_place_that_cannot_be_written(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for attempt in (
        lambda: prepare_folder(tmp_path / path, overwrite=False),
        lambda: write_folder(tmp_path / path, writer("x"), overwrite=False),
    ):
        with pytest.raises(InputError, match=message):
            attempt()
    assert tree(tmp_path) == {"file": "text"}


def test_the_current_folder_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    prepare_folder(here, overwrite=False)
    (tmp_path / ".normsmith").touch()
    monkeypatch.chdir(here)
    before = tree(tmp_path)
    for path in (".", "..", "../here", str(here)):
        with pytest.raises(InputError, match="is or holds the current folder"):
            prepare_folder(Path(path), overwrite=True)
        with pytest.raises(InputError, match="is or holds the current folder"):
            write_folder(Path(path), writer("x"), overwrite=True)
    assert tree(tmp_path) == before


def test_a_path_with_dots_and_a_link_reach_their_target(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a/b")
    write_folder(tmp_path / "link", writer("through the link"), overwrite=False)
    assert (tmp_path / "a/b/deep/file").read_text() == "through the link"
    write_folder(tmp_path / "a/b/../../c", writer("dots"), overwrite=False)
    assert (tmp_path / "c/deep/file").read_text() == "dots"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c", "link"]
