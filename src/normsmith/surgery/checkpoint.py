"""Absorb gains and shifts in a checkpoint on disk, shard by shard: it may be larger than the memory."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from normsmith.errors import InputError, NotFoldableError
from normsmith.folders import check_output, write_folder
from normsmith.surgery.find import NONE_FOUND, Site, Sites, find_norms
from normsmith.surgery.select import Where, select_sites
from normsmith.surgery.shards import INDEX, Checkpoint, Entry, read_checkpoint
from normsmith.surgery.stored import Names
from normsmith.surgery.stream import Edits, Product, read_tensor, single_threaded, write_shards
from normsmith.surgery.table import text_table
from normsmith.surgery.uses import Reader

Tick = Callable[[int, int], None]
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".gguf", ".h5", ".msgpack")
_IN_MEMORY = "load the model and fold it with fold_(model, 'affine') instead"


@dataclass(frozen=True)
class CheckpointReport:
    """What `fold_checkpoint` did: sites that lost gain and shift, sites kept with the reason, files and bytes written.

    `untied` names the output head that was tied to the embeddings and has its own weight now, `left_out` other files of
    weights beside those that were folded: they hold the model before, so they are not copied. `unseen` names modules
    with weights that did not run on the example: should they read a folded norm in another mode, they are not adapted.
    """

    absorbed: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    untied: tuple[str, ...]
    files: tuple[str, ...]
    written: int
    left_out: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [(name, "gain and shift absorbed, norm kept without them") for name in self.absorbed]
        rows += [(name, f"kept: {why}") for name, why in self.kept]
        lines = [text_table(("site", "result"), rows)]
        lines += [f"{name} was tied to the embeddings and has its own weights now" for name in self.untied]
        lines += [f"{name} holds the model as it was and is left out" for name in self.left_out]
        if self.unseen:
            lines.append(
                f"did not run on the example, so not adapted if they read a folded norm: {', '.join(self.unseen)}"
            )
        lines.append(f"{len(self.files)} file(s) of tensors, {self.written / 1e6:,.1f} MB")
        return "\n".join(lines)


def fold_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    where: Where = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict: bool = False,
    tick: Tick | None = None,
) -> CheckpointReport:
    """Absorb the gains and shifts of LayerNorms and RMSNorms into the weights that read them, without loading a model.

    For y = g ⊙ n(x) + s read by W·y + b: W′ = W·diag(g), b′ = b + W·s, g′ = 1, s′ = 0, with the g, s of the function
    (1 + w for a weight that is stored so), computed as in float64 and stored in the old dtype. Who reads a norm is
    found on a model without values; the files are then copied piece by piece, each with the header, order and metadata
    it had. `output` appears complete or not at all; everything else in the folder is copied as it is.

    Args:
        source: a Hugging Face model folder with safetensors, in one file or with an index.
        output: the folder to write.
        where: sites to fold, as in `select_sites`; default all.
        overwrite: replace what an earlier run wrote there.
        trust_remote_code: run the Python files that come with the checkpoint, for an architecture that transformers
            does not have.
        strict: raise if any gain or shift cannot be absorbed, instead of keeping and listing it.
        tick: called with the bytes written so far and those in all.

    Raises:
        InputError: the folder holds no such model, is damaged, incomplete or quantised, needs remote code, or nothing
            can be folded; `output` cannot be used or written. The message names the file.
        NotFoldableError: with `strict`, the sites that cannot be folded and why.
    """
    source, output = Path(source), Path(output)
    check_output(source, output, overwrite)
    files = read_checkpoint(source)
    model = _meta_model(files, trust_remote_code)
    sites = _sites(model, source)
    plan = _Plan(files, Names(model, files), Edits())
    chosen = {site.name for site in select_sites(sites, where)} if sites else set[str]()
    _plan(plan, sites, chosen, trust_remote_code)
    kept = plan.kept
    if strict and (left := [(site.name, kept[site.name]) for site in sites if site.name in kept and _has_some(site)]):
        raise NotFoldableError("cannot be folded: " + "; ".join(f"{name}: {why}" for name, why in left))
    if not plan.absorbed:
        reasons = text_table(("site", "why"), list(kept.items())) if kept else ""
        raise InputError(
            f"{source}: nothing to fold, " + (f"no gain or shift can be moved:\n{reasons}" if kept else NONE_FOUND)
        )
    if strict and sites.unseen:
        raise NotFoldableError(f"{', '.join(sites.unseen)} did not run on the example, so what they read is not known")
    total = sum(e.size for e in (*files.entries.values(), *plan.edits.copies.values()))
    write_folder(output, lambda folder: _write(folder, plan, tick or (lambda done, total: None), total), overwrite)
    names = tuple(shard.path.name for shard in files.shards)
    left_out = _other_weights(files)
    absorbed, untied = tuple(plan.absorbed), tuple(plan.untied)
    return CheckpointReport(absorbed, tuple(kept.items()), untied, names, total, left_out, sites.unseen)


# -- the model without values


@contextmanager
def _quiet() -> Generator[None]:
    """Differences are named in our errors, not in transformers' messages."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _meta_model(files: Checkpoint, trust_remote_code: bool) -> Any:
    """The checkpoint's model on the meta device.

    Raises:
        InputError: transformers does not know the architecture, and remote code is not there or not allowed.
    """
    import transformers

    path = files.folder / "config.json"
    name = next(iter(files.config.get("architectures") or ()), None)
    if not isinstance(name, str):
        raise InputError(f'{path}: names no architecture; write the model\'s class, as "architectures": ["…"]')
    cls: Any = getattr(transformers, name, None)
    native = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    auto: Any = files.config.get("auto_map") or {}
    if not native and auto and not trust_remote_code:
        raise InputError(
            f"{path}: {name} is defined by Python files that come with the checkpoint (auto_map); they are run only "
            "with trust_remote_code=True (--trust-remote-code), so read them first"
        )
    if not native and not auto:
        raise InputError(f"{path}: transformers {transformers.__version__} has no class {name!r}; {_IN_MEMORY}")
    try:
        with _quiet():
            stored = transformers.AutoConfig.from_pretrained(
                str(files.folder), trust_remote_code=trust_remote_code and not native
            )
            config: Any = type(stored).from_dict(copy.deepcopy(files.config))
            config._name_or_path = str(files.folder)  # where remote code is looked for
            with torch.device("meta"):
                # The public way to it, AutoModelFor…, would need to know which of these the class belongs to.
                return cls._from_config(config) if native else _remote(auto, name, config)  # pyright: ignore[reportPrivateUsage]
    except Exception as error:  # whatever a configuration with wrong values makes classes raise
        raise InputError(f"{path}: no model can be made from it ({' '.join(str(error).split())[:300]})") from None


def _remote(auto: dict[str, Any], name: str, config: Any) -> Any:
    import transformers

    keys = [key for key, value in auto.items() if key.startswith("AutoModel") and str(value).endswith(f".{name}")]
    keys = keys or [key for key in auto if key.startswith("AutoModel")]
    return getattr(transformers, keys[0] if keys else "AutoModel").from_config(config, trust_remote_code=True)


def _sites(model: nn.Module, source: Path) -> Sites:
    try:
        with _quiet(), single_threaded():
            return find_norms(model)
    except InputError as error:  # whatever a model's code raises when it asks for values that are not there
        if error.__cause__ is None:
            raise
        reason = " ".join(str(error.__cause__).split())[:200]
        raise InputError(f"{source}: the model does not run without values ({reason}); {_IN_MEMORY}") from None


# -- the plan


@dataclass
class _Plan:
    files: Checkpoint
    names: Names
    edits: Edits

    def __post_init__(self) -> None:
        self.absorbed: list[str] = []
        self.kept: dict[str, str] = {}
        self.untied: list[str] = []


@dataclass(frozen=True)
class _Target:
    """Where a reader's weight lies: the tensor's name (new for an untied head), its shape, the product's place."""

    name: str
    entry: Entry
    axis: int
    bounds: tuple[tuple[int, int], ...]


def _has_some(site: Site) -> bool:
    return site.facts.plain and len(site.facts.shape) == 1 and bool(site.facts.weight or site.facts.bias)


def _plan(plan: _Plan, sites: Sites, chosen: set[str], trust_remote_code: bool) -> None:
    separate: Sites | str | None = None
    for site in (site for site in sites if site.name in chosen):
        heads: dict[str, Entry] = {}
        if site.untie and not site.blocked and _has_some(site):
            separate = _separate(plan.files, plan.names, sites, trust_remote_code) if separate is None else separate
            found = separate if isinstance(separate, str) else _heads(plan, site)
            if isinstance(found, str):
                plan.kept[site.name] = found
                continue
            heads = found
            site = next(s for s in cast("Sites", separate) if s.name == site.name)
        if problem := _fold(plan, site, heads):
            plan.kept[site.name] = problem


def _fold(plan: _Plan, site: Site, heads: dict[str, Entry]) -> str:
    """Add the site's changes to the plan, or return why it stays; `heads` are weights that are made, by name."""
    if site.blocked:
        return site.blocked
    if not _has_some(site):
        what = f"({site.kind}, {type(site.module).__name__})"
        plain = site.facts.plain and len(site.facts.shape) == 1
        return "has neither gain nor shift" if plain else f"is not a LayerNorm or RMSNorm in the usual form {what}"
    own = {name: plan.names.one(f"{site.name}.{name}") for name in (site.facts.weight, site.facts.bias) if name}
    if missing := [name for name, entry in own.items() if entry is None]:
        return f"the files hold {site.name}.{missing[0]} in another form or more than once"
    gain_entry, shift_entry = own.get(site.facts.weight or ""), own.get(site.facts.bias or "")
    gain = None if gain_entry is None else site.facts.offset + read_tensor(gain_entry)
    shift = None if shift_entry is None else read_tensor(shift_entry)
    shift = shift if shift is not None and bool(shift.any()) else None
    products: list[tuple[str, Product]] = []
    biases: list[tuple[str, tuple[tuple[int, int], ...], Product]] = []
    for reader in site.consumers:
        targets = _targets(plan, reader, heads)
        if isinstance(targets, str):
            return targets
        for target in targets:
            product = Product(target.axis, target.bounds, gain, shift, reader.factor)
            products.append((target.name, product))
            if shift is not None:
                bias = plan.names.one(reader.bias) if reader.bias else None
                if bias is None or target.bounds != reader.bounds:
                    return f"{reader.module} has no bias in the files that could carry the norm's shift"
                biases.append((bias.name, reader.bias_bounds or tuple((0, size) for size in bias.shape), product))
    for name, product in products:
        plan.edits.products.setdefault(name, []).append(product)
    for name, bounds, product in biases:
        plan.edits.biases.setdefault(name, []).append((bounds, product))
    for entry, value in ((gain_entry, 1.0 - site.facts.offset), (shift_entry, 0.0)):
        if entry is not None:
            plan.edits.constants[entry.name] = value
    plan.edits.copies.update(heads)
    plan.untied += heads
    plan.absorbed.append(site.name)
    return ""


def _targets(plan: _Plan, reader: Reader, heads: dict[str, Entry]) -> list[_Target] | str:
    if reader.weight in heads:
        return [_Target(reader.weight, heads[reader.weight], reader.axis, reader.bounds)]
    stored = plan.names.of(reader.weight)
    shape = plan.names.shape(reader.weight)
    targets: list[_Target] = []
    for part in stored:
        axis = part.axis_of(reader, shape)
        if axis is None:
            return f"{reader.module} reads {part.entry.name}, which transformers rearranges when it is loaded"
        bounds = reader.bounds if part.is_whole else tuple((0, size) for size in part.entry.shape)
        targets.append(_Target(part.entry.name, part.entry, axis, bounds))
    return targets or f"{reader.module} reads {reader.weight}, which the files do not hold"


# -- a head that is tied to the embeddings


def _separate(files: Checkpoint, names: Names, sites: Sites, trust_remote_code: bool) -> Sites | str:
    """The sites of the model with a head of its own, or why it would not be the same model."""
    shares = "the output head shares its weight with the embeddings"
    model = _meta_model(replace(files, config=_untied(files.config)), trust_remote_code)
    made = {name for site in sites for module in site.untie for name in (f"{module}.weight",)}
    for name, _ in model.named_parameters():
        if name not in made and name not in names.parameters:  # the same setting also ties the bias of BERT's decoder
            return f"{shares}, and untying it would need {name}, which the files do not hold on its own"
    twin = _sites(model, files.folder)
    if len(twin) != len(sites):
        return shares
    for old, new in zip(sites, twin, strict=True):
        renamed = {r.weight: n.weight for r, n in zip(old.consumers, new.consumers, strict=False)} if old.untie else {}
        expected = tuple(replace(r, weight=renamed.get(r.weight, r.weight)) for r in old.consumers)
        if old.name != new.name or expected != new.consumers or new.untie:
            return f"{shares}, and untying them would change what {old.name} feeds"
    return twin


def _heads(plan: _Plan, site: Site) -> dict[str, Entry] | str:
    """The weights that untying makes, each with the tensor it is a copy of."""
    heads: dict[str, Entry] = {}
    for reader in site.consumers:
        if reader.module not in site.untie:
            continue
        name, entry = f"{reader.module}.weight", plan.names.one(reader.weight)
        if entry is None or not plan.names.stays(name):
            return "the output head shares its weight with the embeddings, which the files hold more than once"
        heads[name] = entry
    return heads


# -- writing


def _write(folder: Path, plan: _Plan, tick: Tick, total: int) -> None:
    files, done = plan.files, 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        tick(done, total)

    _copy_others(files, folder)
    if plan.untied:
        _tell_config(folder, plan)
    write_shards(files.shards, folder, plan.edits, advance)


def _copy_others(files: Checkpoint, folder: Path) -> None:
    """Everything that is no file of tensors: tokenizer, configuration, index, texts."""
    for path in files.folder.iterdir():
        if path.is_dir():
            shutil.copytree(
                path, folder / path.name, ignore=lambda _, names: [n for n in names if n.endswith(_WEIGHTS)]
            )
        elif not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)  # without the mode: a configuration may be written anew


def _other_weights(files: Checkpoint) -> tuple[str, ...]:
    """Weights in other files, which would be those of the model before and are left out."""
    shards = {shard.path for shard in files.shards}
    found = (path for path in sorted(files.folder.rglob("*")) if path.name.endswith(_WEIGHTS) and path not in shards)
    return tuple(str(path.relative_to(files.folder)) for path in found)


def _tell_config(folder: Path, plan: _Plan) -> None:
    """Keep configuration and index true: the head is no longer tied, and its weight lies in a file."""
    _write_json(folder / "config.json", _untied(plan.files.config))
    if plan.files.index is None:
        return
    index = copy.deepcopy(plan.files.index)
    for name, entry in plan.edits.copies.items():
        index["weight_map"][name] = entry.path.name
        metadata = index.get("metadata") or {}
        for key, more in (("total_size", entry.size), ("total_parameters", _count(entry))):
            if isinstance(metadata.get(key), int | float):
                metadata[key] += more
    _write_json(folder / INDEX, index)


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config["tie_word_embeddings"] = False
    for part in (cast("dict[str, Any]", value) for value in config.values() if isinstance(value, dict)):
        if "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    return config


def _count(entry: Entry) -> int:
    return torch.Size(entry.shape).numel()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
