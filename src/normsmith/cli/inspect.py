"""`normsmith inspect`."""

from __future__ import annotations

import math
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normsmith.cli.common import JsonFlag, emit
from normsmith.cli.models import TrustFlag

if TYPE_CHECKING:
    from normsmith.bench import Timing
    from normsmith.diagnostics import Removability, StreamProfile

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Folder of any Hugging Face model.")],
    text: Annotated[
        str | None,
        typer.Option("--text", help="Text file or folder, or `stdlib`: audit how well a fixed scale would do on it."),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="With a text: the residual stream block by block, instead of the audit.")
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of the text to use.")] = 8192,
    length: Annotated[int, typer.Option("--length", min=2, help="Window length in tokens.")] = 256,
    probes: Annotated[
        int, typer.Option("--probes", min=0, help="With --stream: tokens at which singular values are taken.")
    ] = 3,
    picture: Annotated[
        Path | None, typer.Option("-o", "--picture", help="PNG or SVG file for the picture of the audit or the stream.")
    ] = None,
    trust_remote_code: TrustFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """List every norm of a model: what it computes, who reads it, whether it can be folded, or why not.

    With --text, the removability audit: per site what one fixed scale would leave unexplained (‖y − ŷ‖/‖y‖), how much
    the scale varies over tokens, the share of outlier tokens, the first position's scale against the others', a
    recommended order of removal, and what removing all of them would save.

    With --text and --stream, for every block: the stream's norm, the angle it is turned by, what the loss gains from
    the block, massive activations, attention sinks, and the extreme singular values of the block's Jacobian.

    Example: normsmith inspect gpt2 --text novel.txt --picture audit.png
    """
    from normsmith.cli.models import load_any
    from normsmith.errors import InputError
    from normsmith.surgery import find_norms

    if stream and text is None:
        raise InputError("--stream looks at the model on a text: give one with --text")
    if picture is not None and text is None:
        raise InputError("--picture shows the audit: give a text with --text")
    if picture is not None and picture.suffix not in (".png", ".svg"):
        raise InputError(f"{picture}: the picture must end in .png or .svg")
    if picture is not None and not picture.parent.is_dir():
        raise InputError(f"{picture}: there is no folder {picture.parent}")
    loaded = load_any(model, trust_remote_code)
    windows = None if text is None else _windows(model, loaded, text, tokens, length, trust_remote_code)
    if stream and windows is not None:
        profile = _profile(loaded, windows, probes, as_json)
        if picture is not None:
            from normsmith.report.stream import draw_stream

            draw_stream(profile, picture)
        emit(profile.to_dict(), as_json, lambda: _stream_text(profile, picture))
        return
    sites = find_norms(loaded)
    if windows is None:
        emit([site.to_dict() for site in sites], as_json, lambda: str(sites))
        return
    found, times = _audit(loaded, sites, windows, as_json)
    if picture is not None:
        from normsmith.report.removability import draw_removability

        draw_removability(found, picture)
    saving = times["with norms"].median / times["without"].median
    result = {"sites": [r.to_dict() for r in found], "speedup_without": saving}
    emit(result, as_json, lambda: _text(found, saving, picture))


def _audit(model: Any, sites: Any, windows: list[Any], quiet: bool) -> tuple[list[Removability], dict[str, Timing]]:
    from normsmith.bench import bench_removal
    from normsmith.diagnostics import audit_removal
    from normsmith.training import Reporter

    rounds = 30
    with Reporter(quiet=quiet) as reporter:
        found = audit_removal(model, windows, sites, tick=reporter.task("auditing", len(windows)).update)
        times = bench_removal(model, sites, rounds, tick=reporter.task("timing", rounds).update)
    return found, times


def _profile(model: Any, windows: list[Any], probes: int, quiet: bool) -> StreamProfile:
    from normsmith.diagnostics import profile_stream
    from normsmith.training import Reporter

    with Reporter(quiet=quiet) as reporter:
        task = reporter.task("looking at the stream", 1)

        def tick(done: int, total: int) -> None:
            task.total = total
            task.update(done)

        # Half precision is enough to run a model, not to tell small angles and singular values apart.
        return profile_stream(model.float(), windows, probes, tick=tick)


def _windows(folder: Path, model: Any, text: str, tokens: int, length: int, trust_remote_code: bool) -> list[Any]:
    from normsmith.cli.models import load_tokenizer
    from normsmith.data import token_windows
    from normsmith.errors import InputError
    from normsmith.traits import is_encoder_decoder

    if "input_ids" not in signature(model.forward).parameters:
        raise InputError(f"{folder}: {type(model).__name__} does not take token ids, so no text can be run through it")
    if is_encoder_decoder(model):
        raise InputError(
            f"{folder}: {type(model).__name__} reads a text and writes another, and one text cannot be run through it; "
            "leave out --text"
        )
    longest = getattr(model.config, "max_position_embeddings", None) or length
    tokenizer = load_tokenizer(folder, trust_remote_code)
    return token_windows(text, tokenizer, min(length, longest), tokens)


def _stream_text(profile: StreamProfile, picture: Path | None) -> str:
    from normsmith.surgery.table import text_table

    def shown(value: float | None, form: str = "{:.3f}") -> str:
        return "–" if value is None else form.format(value)

    header = (
        "block",
        "‖h‖",
        "rms",
        "angle°",
        "cosine",
        "loss without",
        "massive",
        "at",
        "sink",
        "head",
        "σ max",
        "σ min",
    )
    rows = [
        (
            str(layer.layer) if layer.layer else "input",
            f"{layer.norm:.4g}",
            f"{layer.rms:.4g}",
            shown(None if layer.angle is None else math.degrees(layer.angle), "{:.2f}"),
            shown(layer.cosine, "{:.4f}"),
            shown(layer.skip, "{:+.4f}"),
            f"{layer.massive:.0f}×",
            f"{layer.position}:{layer.channel}",
            shown(layer.sink),
            shown(layer.sink_head),
            shown(layer.largest),
            shown(layer.smallest, "{:.2g}"),
        )
        for layer in profile.layers
    ]
    lines = [text_table(header, rows), "", f"{len(rows) - 1} blocks of {profile.blocks}, {profile.tokens} tokens"]
    lines += [
        "loss without: nats per token lost when the block is the identity; massive: largest |h| over the median, at",
        "position:channel; sink and head: attention on the first position, mean and largest head; σ: block Jacobian",
    ]
    lines += profile.notes
    lines += [] if picture is None else [f"picture: {picture}"]
    return "\n".join(lines)


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
