"""`normsmith inspect`."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normsmith.cli.common import JsonFlag, emit
from normsmith.cli.models import TrustFlag

if TYPE_CHECKING:
    from normsmith.bench import Timing
    from normsmith.diagnostics import Removability

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Folder of any Hugging Face model.")],
    text: Annotated[
        str | None,
        typer.Option("--text", help="Text file or folder, or `stdlib`: audit how well a fixed scale would do on it."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text to use.")] = 8192,
    length: Annotated[int, typer.Option("--length", min=2, help="Window length in tokens.")] = 256,
    picture: Annotated[Path | None, typer.Option("--picture", help="PNG or SVG file for the audit's picture.")] = None,
    trust_remote_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """List every norm of a model: what it computes, who reads it, whether it can be folded, or why not.

    With --text, the removability audit: per site what one fixed scale would leave unexplained (‖y − ŷ‖/‖y‖), how much
    the scale varies over tokens, the share of outlier tokens, the first position's scale against the others', a
    recommended order of removal, and what removing all of them would save.

    Example: normsmith inspect gpt2 --text novel.txt --picture audit.png
    """
    from normsmith.cli.models import load_any
    from normsmith.errors import InputError
    from normsmith.surgery import find_norms

    if picture is not None and text is None:
        raise InputError("--picture shows the audit: give a text with --text")
    if picture is not None and picture.suffix not in (".png", ".svg"):
        raise InputError(f"{picture}: the picture must end in .png or .svg")
    if picture is not None and not picture.parent.is_dir():
        raise InputError(f"{picture}: there is no folder {picture.parent}")
    loaded = load_any(model, trust_remote_code)
    sites = find_norms(loaded)
    if text is None:
        emit([site.to_dict() for site in sites], as_json, lambda: str(sites))
        return
    found, times = _audit(model, loaded, sites, text, tokens, length, as_json)
    if picture is not None:
        from normsmith.report.removability import draw_removability

        draw_removability(found, picture)
    saving = times["with norms"].median / times["without"].median
    result = {"sites": [r.to_dict() for r in found], "speedup_without": saving}
    emit(result, as_json, lambda: _text(found, saving, picture))


def _audit(
    folder: Path, model: Any, sites: Any, text: str, tokens: int, length: int, quiet: bool
) -> tuple[list[Removability], dict[str, Timing]]:
    from transformers import AutoTokenizer

    from normsmith.bench import bench_removal
    from normsmith.data import token_windows
    from normsmith.diagnostics import audit_removal
    from normsmith.errors import InputError
    from normsmith.training import Reporter

    if "input_ids" not in signature(model.forward).parameters:
        raise InputError(f"{folder}: {type(model).__name__} does not take token ids, so no text can be run through it")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: no tokenizer could be loaded ({' '.join(str(error).split())[:160]})") from None
    longest = getattr(model.config, "max_position_embeddings", None) or length
    windows = token_windows(text, tokenizer, min(length, longest), tokens)
    rounds = 30
    with Reporter(quiet=quiet) as reporter:
        found = audit_removal(model, windows, sites, tick=reporter.task("auditing", len(windows)).update)
        times = bench_removal(model, sites, rounds, tick=reporter.task("timing", rounds).update)
    return found, times


def _text(found: list[Removability], saving: float, picture: Path | None) -> str:
    from normsmith.surgery.table import text_table

    header = ("site", "role", "unexplained", "variation", "outliers", "first/rest", "parameters", "order")
    rows = [
        (
            r.name,
            r.role,
            f"{r.residual:.3f}",
            f"{r.variation:.3f}",
            f"{100 * r.outliers:.2f} %",
            f"{r.first:.2f}",
            str(r.parameters),
            r.blocked if r.order is None else str(r.order),
        )
        for r in found
    ]
    count = sum(r.order is not None and r.role != "final" for r in found)
    lines = [text_table(header, rows), ""]
    lines.append(
        f"without the {count} removable internal norm(s) a one-token forward runs {saving:.2f} times as fast here"
    )
    lines += [] if picture is None else [f"picture: {picture}"]
    return "\n".join(lines)
