"""Find out by trial whether a model hides later tokens from earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from normsmith.errors import InputError
from normsmith.surgery.example import make_example

_MASKS = ("mask", "position", "type")  # in the names of arguments that are no tokens


def hides_later_tokens(model: nn.Module, inputs_of: Callable[[Any], Mapping[str, Tensor]], example: Any = None) -> bool:
    """Whether norms of the model get another input for a token when earlier tokens change, and none when later ones do.

    A trunk or a classifier on a decoder does not say that it is causal, as a model that generates text does.

    Args:
        model: any model; without an example one of token ids that has a config.
        inputs_of: example → input of each norm by name, (1, time, d).
        example: what the model takes: a mapping, a tensor or a tuple of arguments. The first token ids (batch, time) in
            it or, without any, the first features (batch, time, n) are what is changed.
    """
    if example is None:
        try:
            example = make_example(model)
        except InputError:  # nothing says what it takes
            return False
    found = _variants(example)
    if found is None:
        return False
    variants, length = found
    half = length // 2
    seen, late, early = (inputs_of(variant) for variant in variants)
    tokens = [(seen[name], late[name], early[name]) for name in seen.keys() & late.keys() & early.keys()]
    tokens = [(x, y, z) for x, y, z in tokens if x.shape == y.shape == z.shape == (1, length, x.shape[-1])]
    looks_back = any(not torch.equal(x[:, half:], z[:, half:]) for x, _, z in tokens)
    return looks_back and all(torch.equal(x[:, :half], y[:, :half]) for x, y, _ in tokens)


def _variants(example: Any) -> tuple[list[Any], int] | None:
    """One row of the example, the same with other tokens in its second half, and in its first; their number.

    None for an example without a sequence.
    """
    parts = _named(example)
    chosen = next((name for name, value in parts.items() if _is_sequence(name, value, 2)), None)
    chosen = next((n for n, v in parts.items() if _is_sequence(n, v, 3)), None) if chosen is None else chosen
    if chosen is None:
        return None
    rows = len(parts[chosen])
    one = {n: v[:1] if isinstance(v, Tensor) and v.ndim and len(v) == rows else v for n, v in parts.items()}
    tokens: Tensor = one[chosen]
    length = tokens.shape[1]
    parts = tokens[:, : length // 2], tokens[:, length // 2 :]
    early, late = (-part if tokens.is_floating_point() else part.roll(1, 1) for part in parts)
    changed = (tokens, torch.cat((parts[0], late), dim=1), torch.cat((early, parts[1]), dim=1))
    return [_like(example, {**one, chosen: each}) for each in changed], length


def _is_sequence(name: str, value: Any, ndim: int) -> bool:
    if not isinstance(value, Tensor) or value.ndim != ndim or value.shape[1] < 4 or any(w in name for w in _MASKS):
        return False
    return value.is_floating_point() if ndim == 3 else value.dtype in (torch.int32, torch.int64)


def _named(example: Any) -> dict[str, Any]:
    if hasattr(example, "keys"):
        return {name: example[name] for name in example.keys()}  # noqa: SIM118 (a BatchEncoding iterates otherwise)
    parts = example if isinstance(example, tuple) else (example,)
    return {str(i): part for i, part in enumerate(cast("tuple[Any, ...]", parts))}


def _like(example: Any, parts: dict[str, Any]) -> Any:
    if hasattr(example, "keys"):
        return parts
    return tuple(parts.values()) if isinstance(example, tuple) else next(iter(parts.values()))
