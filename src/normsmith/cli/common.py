"""What every verb shares: exit codes, errors as one sentence, JSON for machines."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
OverwriteFlag = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]

# Typer brings its own copy of click, whose usage errors have no public name.
_USAGE_ERROR: Any = typer.BadParameter.__base__

DONE, FAILED, WRONG_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


def emit(value: Any, as_json: bool, text: Callable[[], str]) -> None:
    """Print `value` as JSON, or its human form."""
    print(json.dumps(value, indent=1, ensure_ascii=False) if as_json else text())


def run(app: typer.Typer) -> int:
    """Run the application; every ending has its exit code: 0 done, 1 failed, 2 wrong input, 130/143 interrupted."""
    from normsmith.errors import NormsmithError

    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = app(standalone_mode=False, prog_name="normsmith") or DONE
        if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this code without a word
            print("normsmith: interrupted", file=sys.stderr)
        return code
    except NormsmithError as error:
        print(f"normsmith: {error}", file=sys.stderr)
        return error.exit_code
    except _USAGE_ERROR as error:
        message = error.format_message()  # without arguments, the whole help text
        print(message if message.startswith("Usage:") else f"normsmith: {message} (see --help)", file=sys.stderr)
        return WRONG_INPUT
    except (KeyboardInterrupt, typer.Abort):
        print("normsmith: interrupted", file=sys.stderr)
        return INTERRUPTED
    except _Terminated:
        print("normsmith: terminated", file=sys.stderr)
        return TERMINATED
    except BrokenPipeError:
        # The reader of our output is gone (`normsmith ls | head`): not our failure, and nothing left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        print(f"normsmith: {name}{error.strerror or error}", file=sys.stderr)
        return FAILED


class _Terminated(BaseException):
    """SIGTERM: like an interruption, so that clean-up runs."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated
