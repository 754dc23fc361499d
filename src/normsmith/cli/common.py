"""What every verb shares: exit codes, errors as one sentence, JSON for machines."""

from __future__ import annotations

import codecs
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from normsmith.ranks import rank, world_size

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
OverwriteFlag = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]
MetricOption = Annotated[
    str | None,
    typer.Option("--metric", help="What decides: loss, or the task's metric by name [the metric, where it has one]."),
]
DifferenceOption = Annotated[
    float,
    typer.Option("--difference", min=1e-9, help="Say how many seeds it takes to see one as large (metric's unit)."),
]

# Typer brings its own copy of click, whose usage errors have no public name.
_USAGE_ERROR: Any = typer.BadParameter.__base__

_ALONE_SECONDS = 15.0  # more than one process of a run lags behind another, and takes to end
DONE, FAILED, WRONG_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


def emit(value: Any, as_json: bool, text: Callable[[], str]) -> None:
    """Print `value` as JSON, or its human form."""
    unicode = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    print(json.dumps(value, indent=1, ensure_ascii=not unicode) if as_json else text())


def run(app: typer.Typer) -> int:
    """Run the application; every ending has its exit code: 0 done, 1 failed, 2 wrong input, 130/143 interrupted."""
    from normsmith.errors import NormsmithError

    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(standalone_mode=False, prog_name="normsmith") or DONE
        if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this code without a word
            print(f"normsmith: {_stopped('interrupted')}", file=sys.stderr)
        return code
    except NormsmithError as error:
        return _fail(f"normsmith: {error}", error.exit_code, error.agreed)
    except _USAGE_ERROR as error:
        message = error.format_message()  # without arguments, the whole help text
        said = message if message.startswith("Usage:") else f"normsmith: {message} (see --help)"
        return _fail(said, WRONG_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(f"normsmith: {_stopped('interrupted')}", INTERRUPTED, agreed=True)
    except _Terminated:
        return _fail(f"normsmith: {_stopped('terminated')}", TERMINATED, agreed=True)
    except BrokenPipeError:
        # The reader of our output is gone (`normsmith ls | head`): not our failure, and nothing left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _fail(f"normsmith: {name}{error.strerror or error}", FAILED)


_CONTINUE = {
    "compare": "; the same command continues",
    "reproduce": "; the same command continues",
    "train": "; the same command with --resume continues from the newest checkpoint",
}


def _stopped(how: str) -> str:
    return how + _CONTINUE.get(next(iter(sys.argv[1:]), ""), "")


def _fail(message: str, code: int, agreed: bool = False) -> int:
    """Say why it failed. Where several processes share the run, rank 0 speaks for all, unless another failed alone."""
    if world_size() > 1 and rank() > 0:
        try:
            # torchrun ends the others when one ends. So rank 0 goes first, and who is not ended has failed alone.
            time.sleep(_ALONE_SECONDS)
        except _Terminated:
            return code
        if agreed:
            return code
        message = f"rank {rank()}: {message}"
    elif world_size() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the message and the exit code are not lost to another's end
    print(message, file=sys.stderr, flush=True)
    return code


class _Terminated(BaseException):
    """SIGTERM: like an interruption, so that clean-up runs."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated
