"""`normsmith bench`: one subcommand per thing that is measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from normsmith.cli.common import JsonFlag, emit
from normsmith.cli.models import DeviceOption, TrustFlag, load_any, place
from normsmith.errors import InputError

if TYPE_CHECKING:
    from normsmith.bench import DecodeSpeed, Timing
    from normsmith.bench.decode import CacheKind

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Measured rounds; every case runs once in each.")]


@app.callback()
def _bench() -> None:
    """Measure speed; every number is a ratio of interleaved runs in one process.

    Example: normsmith bench decode --batch 1 --new-tokens 64
    """


@app.command()
def decode(
    model: Annotated[
        Path | None, typer.Argument(help="Model folder; default: a random one, 8 layers, d = 256.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Sequences decoded together; several with commas.")] = "1",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Prompt length in tokens.")] = 32,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Tokens to generate.")] = 64,
    cache: Annotated[
        str,
        typer.Option("--cache", help="dynamic, static, or none: one pass over the prompt, last token's logits only."),
    ] = "dynamic",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the step (--cache static or none).")] = False,
    rounds: Rounds = 15,
    device: DeviceOption = None,
    as_json: JsonFlag = False,
    trust_remote_code: TrustFlag = False,
) -> None:
    """Tokens per second: baseline with its own and with fused norms, tapered, folded, and the norm-free twin.

    Example: normsmith bench decode runs/demo/taper --batch 1,4,16 --cache static --compile
    """
    import torch

    from normsmith.bench import LABELS, bench_decode, decode_family
    from normsmith.models import NormsmithForCausalLM, preset_config
    from normsmith.training import Reporter

    batches = _numbers("--batch", batch)
    torch.manual_seed(0)
    if model is None:
        sizes = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 8, "initializer_range": 0.08}
        loaded = NormsmithForCausalLM(preset_config("llama", **sizes))
    else:
        loaded = load_any(model, trust_remote_code)
    family = decode_family(place(loaded, device), fused=True)
    found: dict[int, list[DecodeSpeed]] = {}
    with Reporter(quiet=as_json) as reporter:
        for size in batches:
            ids = torch.randint(loaded.config.vocab_size, (size, prompt))
            task = reporter.task("decoding" + (f", batch {size}" if len(batches) > 1 else ""), rounds)
            kind = cast("CacheKind", cache)
            found[size] = bench_decode(family, ids, new_tokens, rounds, tick=task.update, cache=kind, compiled=compiled)

    def text() -> str:
        from normsmith.surgery.table import text_table

        rows: list[tuple[str, ...]] = []
        ceilings: list[str] = []
        for size, speeds in found.items():
            rows += [
                (LABELS[s.name], str(size), f"{s.median:.0f}", f"{s.low:.0f} – {s.high:.0f}", f"{s.ratio:.3f}")
                for s in speeds
            ]
            measured = {s.name: s for s in speeds}
            at = f", batch {size}" if len(found) > 1 else ""
            ceilings.append(f"folded / norm-free twin{at}: {measured['folded'].relative_to(measured['twin']):.3f}")
        return "\n".join([text_table(("model", "batch", "tokens/s", "quartiles", "ratio"), rows), *ceilings])

    how: dict[str, Any] = {"prompt": prompt, "new_tokens": new_tokens, "cache": cache, "compiled": compiled}
    emit([{**dataclasses.asdict(s), "batch": size, **how} for size, rows in found.items() for s in rows], as_json, text)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise InputError(f"{option} {text!r}: write one or several numbers, as 1,4,16")
    return numbers


@app.command()
def ops(
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Rows.")] = 4096,
    width: Annotated[int, typer.Option("--width", min=2, help="Columns.")] = 768,
    p: Annotated[float, typer.Option("--p", help="Member of the sphere family (inf allowed).")] = 1.0,
    rounds: Rounds = 30,
    as_json: JsonFlag = False,
) -> None:
    """The sphere update, forward and backward, beside the residual add and LayerNorm that it replaces.

    Example: normsmith bench ops --tokens 2048 --width 1280
    """
    from normsmith.bench import bench_sphere_update

    compiled, eager = "sphere update, fused, compiled", "sphere update, fused, eager"
    pairs = ((compiled, "add + layer_norm, compiled"), (eager, "sphere update, literal, eager"))
    _show(bench_sphere_update(tokens, width, p, rounds), as_json, pairs)


@app.command()
def step(
    arms: Annotated[
        list[str] | None,
        typer.Option("--arms", help="What is compared, as in `normsmith compare`; the first is the reference."),
    ] = None,
    width: Annotated[int, typer.Option("--width", min=2, help="Width of the model.")] = 384,
    preset: Annotated[str, typer.Option("--preset", help="Kind of block: llama, gpt or nanogpt.")] = "llama",
    heads: Annotated[int | None, typer.Option("--heads", min=1, help="Default: one for each 64 channels.")] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Blocks.")] = 4,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences per step.")] = 2,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a sequence.")] = 256,
    images: Annotated[
        bool, typer.Option("--images", help="A vision transformer; --length is the number of patches.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile.")] = False,
    rounds: Rounds = 12,
    as_json: JsonFlag = False,
) -> None:
    """A training step of the reference model with each arm; default: pre-norm and the sphere, p = 1 and p = ∞.

    Example: normsmith bench step --arms rmsnorm,rmsnorm+taper,autonorm --layers 6
    """
    from normsmith.bench import bench_training_step
    from normsmith.studies.arms import split_arms

    chosen = split_arms(arms or ["pre,proj,geo"])
    kind: dict[str, Any] = {"preset": preset, "heads": heads, "images": images}
    found = bench_training_step(chosen, width, layers, batch, length, rounds, not eager, **kind)
    _show(found, as_json)


@app.command()
def collapse(
    norm: Annotated[str, typer.Option("--norm", help="The candidate that all gates choose.")] = "layernorm",
    width: Annotated[int, typer.Option("--width", min=2, help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Blocks.")] = 6,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences of a pass.")] = 8,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a sequence.")] = 64,
    rounds: Rounds = 41,
    as_json: JsonFlag = False,
) -> None:
    """A forward pass with AutoNorm's gates, and after collapse_, beside the model that never had any.

    Example: normsmith bench collapse --width 512 --batch 2
    """
    from normsmith.bench import bench_collapse

    _show(bench_collapse(norm, width, layers, batch, length, rounds), as_json)


@app.command()
def depth(
    arm: Annotated[str, typer.Option("--arm", help="What is built, as in `normsmith compare`.")] = "proj",
    layers: Annotated[str, typer.Option("--layers", help="Numbers of blocks, growing.")] = "6,12,24,48,96",
    width: Annotated[int, typer.Option("--width", min=4, help="Width of the model.")] = 64,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences per step.")] = 4,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a sequence.")] = 64,
    rounds: Rounds = 9,
    as_json: JsonFlag = False,
) -> None:
    """Training steps of ever deeper models: time and memory that each block adds, drift of the stream's length.

    Example: normsmith bench depth --arm sphere:p=2
    """
    from normsmith.bench import bench_depth

    found = bench_depth(arm, _numbers("--layers", layers), width, batch, length, rounds)

    def text() -> str:
        from normsmith.surgery.table import text_table

        heads = ("layers", "ms", "ms per further layer", "kB kept", "kB per further layer", "drift", "drift, bf16")
        rows = [
            (
                str(f.layers),
                f"{1e3 * f.seconds:.1f}",
                "–" if f.per_layer is None else f"{1e3 * f.per_layer:.2f}",
                f"{f.saved / 1e3:,.0f}",
                "–" if f.saved_per_layer is None else f"{f.saved_per_layer / 1e3:,.0f}",
                f"{f.drift:.1e}",
                f"{f.drift_bf16:.1e}",
            )
            for f in found
        ]
        return text_table(heads, rows)

    emit([dataclasses.asdict(f) for f in found], as_json, text)


@app.command(name="import")
def import_(rounds: Rounds = 5, as_json: JsonFlag = False) -> None:
    """The time of `import normsmith` beside `import torch`.

    Example: normsmith bench import
    """
    from normsmith.bench import bench_import

    _show(bench_import(rounds), as_json)


def _show(timings: dict[str, Timing], as_json: bool, pairs: tuple[tuple[str, str], ...] = ()) -> None:
    """A table with ratios to the first case, and below it the ratios of some pairs."""
    first = next(iter(timings.values()))
    rows: list[dict[str, Any]] = [
        {"case": name, "seconds": t.median, "quartiles": list(t.quartiles), "ratio": t.relative_to(first)}
        for name, t in timings.items()
    ]

    def text() -> str:
        from normsmith.surgery.table import text_table

        cells = [
            (row["case"], f"{1e3 * row['seconds']:.2f}", " – ".join(f"{1e3 * q:.2f}" for q in row["quartiles"]),
             f"{row['ratio']:.3f}")
            for row in rows
        ]  # fmt: skip
        table = text_table(("case", "ms", "quartiles", "ratio"), cells)
        return "\n".join([table, *(f"{a} / {b}: {timings[a].relative_to(timings[b]):.3f}" for a, b in pairs)])

    emit(rows, as_json, text)
