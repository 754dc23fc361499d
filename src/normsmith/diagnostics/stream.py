"""The residual stream, sublayer by sublayer and block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normsmith.connections import Connection
from normsmith.diagnostics.blocks import Blocks, evaluating, find_blocks, run, watching
from normsmith.diagnostics.depth import depth_contribution
from normsmith.diagnostics.jacobian import Extremes, block_jacobians
from normsmith.diagnostics.sinks import attention_sinks
from normsmith.errors import InputError
from normsmith.surgery.example import placed

_PROBED = 64  # tokens of the window in which Jacobians are taken: attention's graph grows with its square


@torch.no_grad()
def stream_scale(model: nn.Module, **inputs: Any) -> list[float]:
    """RMS of the stream at its entry and after each sublayer: √(mean of h²) over tokens and channels.

    Args:
        model: a model whose sublayers are joined by `normsmith.connections`.
        inputs: arguments of one forward pass; tokens that its (batch, time) `attention_mask` masks do not count.
    """
    mask = inputs.get("attention_mask")
    scales: list[Tensor] = []
    connections = [m for m in model.modules() if isinstance(m, Connection)]
    restore: list[tuple[Connection, Any]] = []

    def rms(h: Tensor) -> Tensor:
        if isinstance(mask, Tensor) and mask.shape == h.shape[:2]:
            h = h[mask.to(h.device) != 0]
        return h.float().square().mean().sqrt()

    def watched(connection: Connection) -> Any:
        merge = connection.merge

        def wrapper(h: Tensor, out: Tensor) -> Tensor:
            if not scales:
                scales.append(rms(h))
            new = merge(h, out)
            scales.append(rms(new))
            return new

        return wrapper

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for connection in connections:
            restore.append((connection, vars(connection).get("merge")))  # a merge of the caller's own, or None
            connection.merge = watched(connection)
        model(**placed(model, inputs))
    finally:
        for connection, own in restore:
            del connection.merge
            if own is not None:
                connection.merge = own
        for module, mode in modes.items():
            module.training = mode
    return [float(scale) for scale in scales]


@dataclass(frozen=True)
class StreamLayer:
    """The stream after one block; layer 0 is what goes into the first, and has no angle.

    A number that could not be had is None; the profile's `notes` say why.

    Attributes:
        layer: 0 … the number of blocks.
        norm: mean ‖h‖ over tokens.
        rms: √(mean of h²) over tokens and channels.
        angle: mean over tokens of the angle between the stream before and after the block, in radians.
        cosine: mean over tokens of its cosine.
        skip: loss with this block as the identity, minus the whole model's, in nats per token.
        massive: largest |h_i| divided by the median |h| (of a batch of windows; the largest such ratio).
        position: in its window, of the token with that value.
        channel: of that value.
        sink: share of attention on the first position, mean over heads and over the queries after it.
        sink_head: of the head with the largest share.
        largest: singular value of ∂h_out[t]/∂h_in[t], the largest over the tokens t probed.
        smallest: of them.
        residual: largest ‖Jᵀu − σv‖ of the singular values, an estimate of how far they are from converged.
    """

    layer: int
    norm: float
    rms: float
    angle: float | None = None
    cosine: float | None = None
    skip: float | None = None
    massive: float = 0.0
    position: int = 0
    channel: int = 0
    sink: float | None = None
    sink_head: float | None = None
    largest: float | None = None
    smallest: float | None = None
    residual: float | None = None


@dataclass(frozen=True)
class StreamProfile:
    """What `profile_stream` found: the list of blocks, the layers, and what could not be measured."""

    blocks: str
    tokens: int
    layers: tuple[StreamLayer, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def angles(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """The angle between two streams, token by token, and its cosine: (…, d) twice → (…) twice, in float64.

    θ = 2·atan2(‖u − v‖, ‖u + v‖) for unit vectors u, v, which unlike arccos⟨u, v⟩ keeps small angles (Kahan, 2006).
    """
    u, v = (h.double() / h.double().norm(dim=-1, keepdim=True).clamp_min(1e-300) for h in (before, after))
    theta = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
    return theta, (u * v).sum(-1)


class _Sums:
    """What is added up over windows for one layer."""

    def __init__(self) -> None:
        self.tokens = self.values = 0
        self.norm = self.square = self.angle = self.cosine = 0.0
        self.massive, self.position, self.channel = 0.0, 0, 0

    def add(self, h: Tensor, before: Tensor | None) -> None:
        lengths = h.double().norm(dim=-1)
        self.tokens += lengths.numel()
        self.values += h.numel()
        self.norm += float(lengths.sum())
        self.square += float(lengths.square().sum())
        if before is not None:
            theta, cosine = angles(before, h)
            self.angle += float(theta.sum())
            self.cosine += float(cosine.sum())
        size = h.float().abs()
        ratio = float(size.max() / size.median().clamp_min(1e-30))
        if ratio > self.massive:
            place = int(size.argmax())
            self.massive, self.channel = ratio, place % h.shape[-1]
            self.position = place // h.shape[-1] % h.shape[-2]

    def layer(self, index: int) -> StreamLayer:
        return StreamLayer(
            index,
            self.norm / self.tokens,
            math.sqrt(self.square / self.values),
            self.angle / self.tokens if index else None,
            self.cosine / self.tokens if index else None,
            massive=self.massive,
            position=self.position,
            channel=self.channel,
        )


def stream_layers(model: nn.Module, windows: Sequence[Tensor]) -> tuple[StreamLayer, ...]:
    """What one forward pass per window shows of the stream before and after every block: see `StreamLayer`.

    Args:
        model: any model that takes `input_ids` and has its blocks in one `nn.ModuleList`.
        windows: token ids (batch, time), all of one length above 1.

    Raises:
        InputError: the blocks cannot be found.
    """
    return tuple(_measured(model, windows, find_blocks(model, windows[0][:1]), lambda _: None))


def profile_stream(
    model: nn.Module,
    windows: Sequence[Tensor],
    probes: int = 3,
    steps: int = 64,
    tick: Callable[[int, int], None] | None = None,
) -> StreamProfile:
    """Look at the stream before and after every block, at what each block is worth, and at how it transforms tokens.

    Args:
        model: any model that takes `input_ids` and has its blocks in one `nn.ModuleList`.
        windows: token ids (batch, time), all of one length above 1.
        probes: tokens of the first window at which singular values are taken, evenly spread; 0 for none.
        steps: of Lanczos for them, see `extreme_singular_values`.
        tick: told how many steps are done and how many there are.

    Raises:
        InputError: the blocks cannot be found.
    """
    blocks = find_blocks(model, windows[0][:1])
    count = len(blocks.modules)
    total = len(windows) + count + 3

    def done(number: int) -> None:
        if tick is not None:
            tick(number, total)

    layers = _measured(model, windows, blocks, done)
    notes: list[str] = []
    try:
        increases = depth_contribution(model, windows, blocks, lambda n: done(len(windows) + n))
        layers[1:] = [replace(layer, skip=skip) for layer, skip in zip(layers[1:], increases, strict=True)]
    except InputError as error:
        notes.append(f"contribution of blocks: {error}")
    try:
        shares = attention_sinks(model, windows)
        if len(shares) != count:
            raise InputError(f"{len(shares)} layers of attention for {count} blocks")
        layers[1:] = [replace(layer, sink=m, sink_head=h) for layer, (m, h) in zip(layers[1:], shares, strict=True)]
    except InputError as error:
        notes.append(f"attention sinks: {error}")
    done(total - 1)
    if probes:
        ids = windows[0][:1, :_PROBED]
        positions = sorted({int(t) for t in torch.linspace(0, ids.shape[1] - 1, probes)})
        try:
            found = block_jacobians(model, ids, blocks, positions, steps)
            layers[1:] = [_with_extremes(layer, e) for layer, e in zip(layers[1:], found, strict=True)]
            if any(layer.residual for layer in layers):
                notes.append(f"singular values: after {steps} Lanczos steps the smallest ones are upper bounds")
        except InputError as error:
            notes.append(f"singular values: {error}")
    done(total)
    return StreamProfile(blocks.name, sum(w.numel() for w in windows), tuple(layers), tuple(notes))


@torch.no_grad()
def _measured(
    model: nn.Module, windows: Sequence[Tensor], blocks: Blocks, done: Callable[[int], None]
) -> list[StreamLayer]:
    sums = [_Sums() for _ in range(len(blocks.modules) + 1)]
    with evaluating(model), watching(blocks) as stream:
        for number, ids in enumerate(windows, 1):
            run(model, ids)
            for s, h, before in zip(sums, stream, [None, *stream[:-1]], strict=True):
                s.add(h, before)
            done(number)
    return [s.layer(index) for index, s in enumerate(sums)]


def _with_extremes(layer: StreamLayer, found: Extremes) -> StreamLayer:
    worst = torch.maximum(found.largest_residual, found.smallest_residual)
    return replace(
        layer, largest=float(found.largest.max()), smallest=float(found.smallest.min()), residual=float(worst.max())
    )
