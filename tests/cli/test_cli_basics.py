"""The command line itself: help, usage errors, exit codes of interruptions, the console script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from normsmith.cli import VERBS
from normsmith.errors import VerificationError
from normsmith.studies import library
from tests.cli.conftest import normsmith

SCRIPT = Path(sys.executable).parent / "normsmith"


@pytest.mark.parametrize(
    "verb",
    [[], *([v] for v in VERBS), *(["bench", b] for b in ("decode", "ops", "step", "collapse", "depth", "import"))],
    ids=" ".join,
)
def test_help_shows_an_example(verb: list[str]) -> None:
    result = normsmith(*verb, "--help")
    assert result.code == 0
    assert result.err == ""
    assert f"Usage: normsmith {' '.join(verb)}".strip() in result.out
    assert " ".join(["Example: normsmith", *verb]) in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bnch"], r"unknown command 'bnch'; did you mean 'bench'\?"),
        (["bench", "decod"], r"No such command 'decod'.*'decode'.*\(see --help\)"),
        (["train"], r"Missing argument 'recipe'.*\(see --help\)"),
        (["fold", "somewhere"], r"Missing option '-o' / '--output'.*\(see --help\)"),
        (["train", "a.yaml", "--ouput", "x"], r"No such option: --ouput.*\(see --help\)"),
        (["ls", "norms", "more"], r"unexpected extra argument.*\(see --help\)"),
        (["demo", "--seed", "many"], r"Invalid value for '--seed'.*\(see --help\)"),
        (["bench", "decode", "--rounds", "0"], r"Invalid value for '--rounds'.*\(see --help\)"),
    ],
)
def test_usage_errors_are_one_sentence_and_code_2(arguments: list[str], message: str) -> None:
    normsmith(*arguments).refused(message)


@pytest.mark.parametrize(("options", "shown"), [((), "x?"), (("--json",), "\\u2299")])
def test_what_the_terminal_cannot_show_does_not_end_a_command(options: tuple[str, ...], shown: str) -> None:
    narrow = {**os.environ, "PYTHONIOENCODING": "cp1252", "COLUMNS": "200"}
    done = subprocess.run([SCRIPT, "ls", "norms", *options], capture_output=True, env=narrow, check=True)
    assert done.stderr == b""
    assert shown.encode() in done.stdout.replace(b" ", b"")


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_without_a_verb_the_help_is_printed_and_the_code_is_2(arguments: list[str]) -> None:
    result = normsmith(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("Usage: normsmith")
    assert "--help" in result.err


def test_the_console_script_helps_without_loading_torch() -> None:
    command = [sys.executable, "-X", "importtime", SCRIPT, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in VERBS)
    assert "typer" in done.stderr
    assert "torch" not in done.stderr


def test_the_console_script_reports_wrong_input_to_the_shell() -> None:
    done = subprocess.run([SCRIPT, "lst"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "normsmith: unknown command 'lst'; did you mean 'ls'?\n"


def _signal_when(path: Path, number: int) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_during_training_has_its_own_exit_code(number: int, code: int, word: str, work: Path) -> None:
    # A shell that runs the tests in the background hands down an ignored SIGINT; a user's terminal does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = _signal_when(work / "out/checkpoints/checkpoint-2/trainer_state.json", number)
    steps = ("--set", "training.max_steps=1000", "--set", "training.save_every=2")
    result = normsmith("train", "tiny.yaml", "-o", "out", "--json", *steps)
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert (result.code, result.out) == (code, "")
    assert (
        result.err.strip() == f"normsmith: {word}; the same command with --resume continues from the newest checkpoint"
    )
    assert not (work / "out/result.json").exists()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (VerificationError("the logits differ"), 1, "normsmith: the logits differ\n"),
        (OSError(28, "No space left on device", "/data/x"), 1, "normsmith: /data/x: No space left on device\n"),
    ],
)
def test_failures_that_are_not_the_users_have_code_1(
    error: Exception, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise error

    monkeypatch.setattr(library, "listing", fail)
    result = normsmith("ls")
    assert (result.code, result.out, result.err) == (code, "", message)
