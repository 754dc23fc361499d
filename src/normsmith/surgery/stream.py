"""Write files of tensors again with some of them multiplied, a megabyte at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from normsmith.errors import InputError
from normsmith.surgery.shards import FLOATS, Entry, Shard

_BLOCK = 1 << 20  # bytes held at a time by each thread: small enough for the caches
Bounds = tuple[tuple[int, int], ...]


@dataclass
class Product:
    """W·diag(gain) for one part of a stored weight, and what W·shift adds to its bias.

    `axis` is the weight's axis that met the norm's output, `bounds` the part of the weight that did. `total` collects
    factor·W·shift, with the old W, while the weight goes by; None where the norm has no shift.
    """

    axis: int
    bounds: Bounds
    gain: Tensor | None
    shift: Tensor | None = None
    factor: float = 1.0
    total: Tensor | None = None

    def __post_init__(self) -> None:
        if self.shift is not None:
            sizes = [stop - start for i, (start, stop) in enumerate(self.bounds) if i != self.axis]
            self.total = torch.zeros(sizes, dtype=torch.float64)

    def apply(self, block: Tensor, place: Bounds) -> None:
        """Multiply `block` in place, whose elements stand at `place` in the weight."""
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.bounds, place, strict=True)]
        if any(start >= stop for start, stop in common):
            return
        part = block[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, place, strict=True))]
        inside = [slice(a - c, b - c) for (a, b), (c, _) in zip(common, self.bounds, strict=True)]
        features = inside.pop(self.axis)
        if self.total is not None and self.shift is not None:
            wide = part.movedim(self.axis, -1).double()
            self.total[tuple(inside)] += self.factor * (wide @ self.shift[features])
        if self.gain is not None:
            multiply_(part, self.gain[features], self.axis)


def multiply_(weight: Tensor, gain: Tensor, axis: int) -> None:
    """weight ← weight·diag(gain) along one axis, in place, with the bits of a float64 product; the gain is float64.

    Where the gain is a number of the weight's own dtype, the dtype's own product has them, and is faster: a float32
    holds the product of two bfloat16 or float16 exactly, and one of two float32 or float64 is rounded once.
    """
    shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
    narrow = gain.to(weight.dtype)
    if torch.equal(narrow.double(), gain):
        weight.mul_(narrow.reshape(shape))
    else:
        weight.copy_(weight.double().mul_(gain.reshape(shape)))


@dataclass
class Edits:
    """What changes, by names in the files: products, constants, additions to biases, and copies under a new name."""

    products: dict[str, list[Product]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    biases: dict[str, list[tuple[Bounds, Product]]] = field(default_factory=dict)
    copies: dict[str, Entry] = field(default_factory=dict)  # new name → the tensor that is copied


def write_shards(shards: Sequence[Shard], folder: Path, edits: Edits, advance: Callable[[int], None]) -> None:
    """Write every shard under its name to `folder`, with the changes of `edits`, and wait until all is on the disk.

    Two threads take one tensor after the other: one multiplies while the other reads or writes.

    Args:
        shards: what to write.
        folder: where to.
        edits: the changes.
        advance: called with the number of bytes of each tensor that has been written.

    Raises:
        InputError: a product is too large for its dtype, or a file changed while it was read.
        OSError: the disk is full, for instance.
    """
    jobs: list[_Job] = []
    for shard in shards:
        new = {name: e for name, e in edits.copies.items() if e.path == shard.path}
        header = _longer(shard, new) if new else shard.header
        path, later = folder / shard.path.name, len(header) - len(shard.header)
        path.write_bytes(header)
        jobs += [_Job(entry.name, entry, path, entry.start + later) for entry in shard.entries]
        start = max((entry.stop for entry in shard.entries), default=0) + later
        for name, entry in new.items():
            jobs.append(_Job(name, entry, path, start))
            start += entry.size
    with single_threaded(), ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(_write_tensor, job, edits) for job in jobs]
        try:
            for job, future in zip(jobs, futures, strict=True):
                future.result()
                advance(job.entry.size)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error or an interruption the others need not be written
    for job in jobs:
        if job.name in edits.biases:
            _add_to_bias(job, edits.biases[job.name])
    for shard in shards:
        with (folder / shard.path.name).open("rb+") as file:
            os.fsync(file.fileno())


@dataclass(frozen=True)
class _Job:
    """Write the tensor `entry` to `path` at `offset`, as `name`."""

    name: str
    entry: Entry
    path: Path
    offset: int


@contextmanager
def single_threaded() -> Generator[None]:
    """Small operations and threads of our own lose more by waiting for torch's threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_tensor(job: _Job, edits: Edits) -> None:
    entry, products = job.entry, edits.products.get(job.name)
    buffer = bytearray(min(_BLOCK, entry.size))
    with entry.path.open("rb", buffering=0) as source, job.path.open("rb+", buffering=0) as target:
        source.seek(entry.start)
        target.seek(job.offset)
        for place, size in _blocks(entry, products is not None):
            view = memoryview(buffer)[:size] if size <= _BLOCK else memoryview(bytearray(size))
            _take(source, view, entry)
            if job.name in edits.constants:
                _tensor(view, entry).fill_(edits.constants[job.name])
            if products is not None:
                _multiply(view, entry, place, products)
            _put(target, view)


def _add_to_bias(job: _Job, additions: list[tuple[Bounds, Product]]) -> None:
    """b + W·shift, for the bias b."""
    bias = read_tensor(job.entry)
    for bounds, product in additions:
        if product.total is not None:
            bias[tuple(slice(*b) for b in bounds)] += product.total.reshape([b - a for a, b in bounds])
    view = memoryview(bytearray(job.entry.size))
    _tensor(view, job.entry).copy_(bias.flatten())
    with job.path.open("rb+", buffering=0) as target:
        target.seek(job.offset)
        _put(target, view)


def read_tensor(entry: Entry) -> Tensor:
    """A small tensor's values in float64."""
    view = memoryview(bytearray(entry.size))
    with entry.path.open("rb", buffering=0) as source:
        source.seek(entry.start)
        _take(source, view, entry)
    return _tensor(view, entry).reshape(entry.shape).double()


def _blocks(entry: Entry, by_rows: bool) -> Iterator[tuple[Bounds, int]]:
    """Pieces of a tensor one after the other, as (place in it, bytes); without `by_rows` they may end anywhere."""
    if by_rows:
        yield from _rows(entry.shape, (), FLOATS[entry.dtype].itemsize)
        return
    for start in range(0, entry.size, _BLOCK):
        yield (), min(_BLOCK, entry.size - start)


def _rows(shape: tuple[int, ...], before: Bounds, item: int) -> Iterator[tuple[Bounds, int]]:
    """Whole rows of the first axis; where one of them is larger than a block, rows of the axes behind it."""
    length, *inner = shape
    row = item * math.prod(inner)
    if row > _BLOCK and inner:
        for i in range(length):
            yield from _rows(tuple(inner), (*before, (i, i + 1)), item)
        return
    many = max(_BLOCK // max(row, 1), 1)
    rest = tuple((0, size) for size in inner)
    for first in range(0, length, many):
        last = min(first + many, length)
        yield (*before, (first, last), *rest), (last - first) * row


def _multiply(view: memoryview, entry: Entry, place: Bounds, products: list[Product]) -> None:
    block = _tensor(view, entry).reshape([stop - start for start, stop in place])
    # Only float16 is so short that a product of ordinary numbers can leave its range.
    finite = block.dtype != torch.float16 or bool(block.isfinite().all())
    for product in products:
        product.apply(block, place)
    if block.dtype == torch.float16 and finite and not bool(block.isfinite().all()):
        raise InputError(
            f"{entry.path}: {entry.name} times the norm's gain is too large for float16; convert the checkpoint to "
            "bfloat16 or float32 first"
        )


def _tensor(view: memoryview, entry: Entry) -> Tensor:
    return torch.frombuffer(view, dtype=FLOATS[entry.dtype])


def _take(source: FileIO, view: memoryview, entry: Entry) -> None:
    while len(view):
        count = source.readinto(view)
        if not count:
            raise InputError(f"{entry.path}: ended while {entry.name} was read; something else is changing the file")
        view = view[count:]


def _put(target: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[target.write(view) :]


def _longer(shard: Shard, new: dict[str, Entry]) -> bytes:
    """The header with further tensors behind the others."""
    header = json.loads(shard.header[8:])
    end = max((entry.stop for entry in shard.entries), default=len(shard.header)) - len(shard.header)
    for name, entry in new.items():
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [end, end + entry.size]}
        end += entry.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the first tensor to eight bytes
    return len(text).to_bytes(8, "little") + text
