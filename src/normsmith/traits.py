"""What a model of transformers, or one like it, says of itself."""

from __future__ import annotations

from typing import Any


def is_encoder_decoder(model: Any) -> bool:
    """Whether it reads one text and writes another, so that an argument may belong to either."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def generates(model: Any) -> bool:
    """Whether it writes text from left to right, after one that it was given or after a beginning of its own."""
    return callable(can := getattr(model, "can_generate", None)) and bool(can())


def is_causal_lm(model: Any) -> bool:
    """Whether it continues a text token by token: a likelihood and a decoding speed are then defined."""
    return generates(model) and not is_encoder_decoder(model)
