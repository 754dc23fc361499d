"""Calls of the command line inside the test process, and small real runs that several tests read."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from normsmith.cli import app
from normsmith.cli.common import run

RECIPE = """\
name: tiny
data: {source: corpus.txt, vocab_size: 300, sequence_length: 16, validation_fraction: 0.2}
model: {preset: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, initializer_range: 0.1}
training: {max_steps: 12, batch_size: 4, learning_rate: 1e-2, log_every: 3}
"""
TAPER = RECIPE.replace("tiny", "taper") + "schedule: {kind: taper, warmup: 0.2, momentum: 0.3}\n"

_PROGRESS = re.compile(r"reading |using the cached folder |training a byte-level BPE |tokenising |[\w ,=]+: \d+/\d+ ")


@dataclass(frozen=True)
class Result:
    """How one call ended."""

    code: int
    out: str
    err: str

    def refused(self, *patterns: str) -> str:
        """Wrong input: exit code 2, one sentence on stderr after the progress lines, nothing on stdout."""
        assert self.code == 2, self
        assert self.out == ""
        *before, message = self.err.splitlines()
        assert message.startswith("normsmith: "), self.err
        assert [line for line in before if not _PROGRESS.match(line)] == []
        for pattern in patterns:
            assert re.search(pattern, message), message
        return message


def normsmith(*arguments: object) -> Result:
    """The console script in this process: the same `run`, the same exit codes."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            mock.patch.object(sys, "argv", ["normsmith", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = run(app)
    finally:
        signal.signal(signal.SIGTERM, before)
    return Result(code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes, every folder with none."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def corpus(lines: int = 1200) -> str:
    """Varied text with blank lines, about 55 thousand characters."""
    words = ("quick", "brown", "lazy", "small"), ("fox", "dog", "cat")
    text = [
        f"Line {i}: the {words[0][i % 4]} {words[1][i * 7 % 3]} jumps over {i * i % 97} fences.\n" for i in range(lines)
    ]
    return "".join(line + "\n" * (i % 9 == 0) for i, line in enumerate(text))


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def trained(_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus, the recipes `tiny.yaml` and `taper.yaml`, and both trained: `tiny/` and `taper/`."""
    folder = tmp_path_factory.mktemp("trained")
    fill(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setenv("NORMSMITH_CACHE", str(_cache))
        for name in ("tiny", "taper"):
            result = normsmith("train", f"{name}.yaml", "-o", name)
            assert result.code == 0, result
    return folder


def fill(folder: Path) -> None:
    """Write the corpus and the recipes."""
    (folder / "corpus.txt").write_text(corpus())
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "taper.yaml").write_text(TAPER)


@pytest.fixture
def work(_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own working folder with the corpus and the recipes."""
    monkeypatch.setenv("NORMSMITH_CACHE", str(_cache))
    fill(tmp_path)
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture
def unchanged(work: Path) -> Iterator[Callable[[], None]]:
    """Check that nothing in the working folder appeared, changed or went, hidden files included."""
    before = contents(work)

    def check() -> None:
        assert contents(work) == before

    yield check
    check()
