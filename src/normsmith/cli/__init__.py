"""The command line: one file per verb, imported when it is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any

# Before torch is imported anywhere: spinning OpenMP threads make concurrent processes several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # our own progress says what happens

import typer
from typer.core import TyperGroup

from normsmith.errors import InputError, UnknownNameError
from normsmith.ranks import world_size

# verb → one line of help; the module normsmith.cli.<verb> holds a typer app or command of that name
VERBS = {
    "demo": "Train three arms on real text, fold one, measure, write a report.",
    "train": "Train what a recipe says.",
    "compare": "Train several arms over several seeds; say what is better, and how surely.",
    "reproduce": "Run a paper's tables as studies, with the published figures beside ours.",
    "report": "Show what studies found: one HTML page, Markdown or CSV.",
    "inspect": "List a model's norms; with a text, audit how removable each one is.",
    "swap": "Replace a model's norms by another kind.",
    "taper": "Remove a pretrained model's norms by fine-tuning; fold, verify, measure.",
    "fold": "Absorb norms, or their gains and shifts, into the linear layers beside them.",
    "convert": "Write a changed model as native, stock or ONNX.",
    "eval": "Zero-shot benchmarks with standard errors, or item by item against another model.",
    "bench": "Measure speed: decode, ops, step, collapse, depth, import.",
    "ls": "List norms, connections, schedules, presets, recipes, suites.",
    "validate": "Check a recipe without running it.",
}


class _Verbs(TyperGroup):
    """Loads a verb's module when it is called, so that `--help` and wrong names answer at once."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            raise UnknownNameError("command", cmd_name, VERBS)
        if cmd_name != "train" and world_size() > 1:
            raise InputError(
                f"{cmd_name} runs in one process: start it without torchrun; only train shares a run between several"
            )
        app: Any = importlib.import_module(f"normsmith.cli.{cmd_name}").app
        command = typer.main.get_command(app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(
    cls=_Verbs, rich_markup_mode=None, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def _root() -> None:
    """Choose, connect, remove and measure the normalisation layers of transformers.

    Example: normsmith demo --quick
    """


def main() -> None:
    """The console script."""
    from normsmith.cli.common import run

    # A terminal or file that has no → or ‖ shows a question mark instead of ending what was computed with a traceback.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(app))
