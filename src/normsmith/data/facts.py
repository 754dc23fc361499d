"""What a model must know of the data it is made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Sizes that decide a model's first and last layer; what does not apply is left at its default.

    Attributes:
        vocab_size: rows of a token embedding.
        length: longest sequence in tokens.
        labels: names of the classes or tags, in the order of their numbers.
        image_size: height and width in pixels.
        channels: of an image.
        features: names of the columns that are read.
        targets: names of the columns that are predicted.
    """

    vocab_size: int = 1
    length: int = 1
    labels: tuple[str, ...] = ()
    image_size: tuple[int, int] = (0, 0)
    channels: int = 0
    features: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
