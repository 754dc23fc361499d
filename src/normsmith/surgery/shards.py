"""Read the layout of a checkpoint in safetensors files: which tensor lies where, without reading any of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from normsmith.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its bytes are those from `start` up to `stop`."""

    name: str
    dtype: str  # as the format calls it: F32, BF16, I8, …
    shape: tuple[int, ...]
    start: int
    stop: int
    path: Path

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """One file: its length and header as they are stored, and its tensors in the order of their bytes."""

    path: Path
    header: bytes
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A model folder: its configuration, its index (None for a single file), and its files of tensors."""

    folder: Path
    config: dict[str, Any]
    index: dict[str, Any] | None
    shards: tuple[Shard, ...]

    @property
    def entries(self) -> dict[str, Entry]:
        """Every tensor by its name in the files."""
        return {entry.name: entry for shard in self.shards for entry in shard.entries}


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check the layout of the model in `folder`.

    Raises:
        InputError: no such folder, no configuration, a quantised model, no safetensors (pickles are never read), a
            damaged or missing file, or an index that says something else than the files; the message names the file.
    """
    config = read_config(folder)
    if config.get("quantization_config"):
        raise InputError(
            f"{folder / 'config.json'}: the model is quantised (quantization_config), so its weights cannot be "
            "multiplied; fold the unquantised model, then quantise"
        )
    if (folder / SINGLE).exists():
        return Checkpoint(folder, config, None, (read_shard(folder / SINGLE),))
    if not (folder / INDEX).exists():
        raise InputError(_no_weights(folder))
    index = read_json(folder / INDEX)
    return Checkpoint(folder, config, index, _indexed(folder, index))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        InputError: no such folder, no config.json, or one that is no JSON object.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}: " + ("is a file, expected a model folder" if folder.exists() else "no such folder")
        )
    if not (folder / "config.json").exists():
        raise InputError(f"{folder}: holds no model (config.json is missing)")
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or an InputError that names the file."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no JSON object")
    return cast("dict[str, Any]", value)


def read_shard(path: Path) -> Shard:
    """The layout of one file.

    Raises:
        InputError: it is missing, truncated or damaged.
    """
    try:
        with safe_open(str(path), "pt"):  # checks the header, and the file's size against it
            pass
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
    except FileNotFoundError:
        raise InputError(f"{path}: the file is missing; download or copy the checkpoint again") from None
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: is truncated or damaged ({reason}); download or copy it again") from None
    begin = 8 + len(header)  # the format counts from the end of the header
    entries: list[Entry] = []
    for name, info in json.loads(header).items():
        if name != "__metadata__":
            start, stop = info["data_offsets"]
            entries.append(Entry(name, info["dtype"], tuple(info["shape"]), begin + start, begin + stop, path))
    return Shard(path, length + header, tuple(sorted(entries, key=lambda entry: (entry.start, entry.stop))))


def _indexed(folder: Path, index: dict[str, Any]) -> tuple[Shard, ...]:
    path = folder / INDEX
    places: Any = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InputError(f"{path}: has no weight_map that says which tensor lies in which file")
    weight_map = cast("dict[str, Any]", places)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{path}: {name} shall lie in {file!r}, which is no name of a file in this folder")
    shards = tuple(read_shard(folder / file) for file in dict.fromkeys(weight_map.values()))
    found = {(entry.name, shard.path.name) for shard in shards for entry in shard.entries}
    for name, file in weight_map.items():
        if (name, file) not in found:
            raise InputError(f"{path}: says that {name} lies in {file}, which holds no such tensor")
    for name, file in sorted(found):
        if weight_map.get(name) != file:
            raise InputError(f"{path}: has no entry for {name}, which lies in {file}")
    return shards


def _no_weights(folder: Path) -> str:
    pickle = next((path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))), None)
    if pickle is None:
        return f"{folder}: holds no weights ({SINGLE} or {INDEX} is missing)"
    return (
        f"{folder / pickle}: is a pickle, which can run code when it is read, so only safetensors are read; convert it "
        "with save_pretrained of a recent transformers, on a machine that trusts it"
    )
