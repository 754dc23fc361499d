"""Random crop, flip, mixup and cutmix of training images, one image at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from normsmith.data.examples import Examples, as_probabilities

Image = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Augmentation:
    """Options as in `ImagesConfig`; `classes` are the names of the labels.

    Every image draws its own partner and its own share, so that a batch does not decide what is mixed.
    """

    crop: int
    flip: bool
    mixup: float
    cutmix: float
    mix_probability: float
    classes: tuple[str, ...]

    @property
    def active(self) -> bool:
        """Whether it changes anything."""
        return bool(self.crop or self.flip or self.mixes)

    @property
    def mixes(self) -> list[str]:
        """The kinds of mixing that are on."""
        chosen = {"mixup": self.mixup, "cutmix": self.cutmix}
        return [name for name, alpha in chosen.items() if alpha and self.mix_probability]

    def __call__(self, examples: Examples, index: int, random: np.random.Generator) -> dict[str, Tensor]:
        """The item of example `index`: pixels (c, h, w) in [0, 1]; labels are probabilities if anything is mixed."""
        item = self._item(examples, index, random)
        if not self.mixes:
            return item
        item = {**item, "labels": as_probabilities(item["labels"], len(self.classes))}
        if random.random() >= self.mix_probability:
            return item
        how = self.mixes[int(random.integers(len(self.mixes)))]
        other = self._item(examples, int(random.integers(len(examples))), random)
        mix = mixup if how == "mixup" else cutmix
        share = float(random.beta(self.mixup, self.mixup) if how == "mixup" else random.beta(self.cutmix, self.cutmix))
        pixels, share = mix(item["pixel_values"], other["pixel_values"], share, random)
        theirs = as_probabilities(other["labels"], len(self.classes))
        return {"pixel_values": pixels, "labels": share * item["labels"] + (1 - share) * theirs}

    def _item(self, examples: Examples, index: int, random: np.random.Generator) -> dict[str, Tensor]:
        row: dict[str, Any] = examples.row(index)
        image = row["image"]
        if self.crop:
            image = random_crop(image, self.crop, random)
        if self.flip and random.random() < 0.5:
            image = image[:, ::-1]
        return examples.finish({**row, "image": image})


def random_crop(image: Image, margin: int, random: np.random.Generator) -> Image:
    """Surround (h, w, c) with `margin` zeros and cut (h, w, c) from a random place."""
    height, width, channels = image.shape
    padded = np.zeros((height + 2 * margin, width + 2 * margin, channels), image.dtype)  # a third of the time of np.pad
    padded[margin : margin + height, margin : margin + width] = image
    top, left = random.integers(2 * margin + 1, size=2)
    return padded[top : top + height, left : left + width]


def mixup(a: Tensor, b: Tensor, share: float, random: np.random.Generator) -> tuple[Tensor, float]:
    """share·a + (1 − share)·b, and the share of a."""
    return share * a + (1 - share) * b, share


def cutmix(a: Tensor, b: Tensor, share: float, random: np.random.Generator) -> tuple[Tensor, float]:
    """`a` (c, h, w) with a rectangle of about (1 − share) of its area from b, and the share of a that is left.

    The rectangle's centre is anywhere in the image, so it can be cut off at the border; the share counts pixels.
    """
    height, width = a.shape[1:]
    half = np.sqrt(1 - share) / 2
    y, x = random.integers(height), random.integers(width)
    top, bottom = (int(np.clip(round(y + sign * half * height), 0, height)) for sign in (-1, 1))
    left, right = (int(np.clip(round(x + sign * half * width), 0, width)) for sign in (-1, 1))
    mixed = torch.clone(a)
    mixed[:, top:bottom, left:right] = b[:, top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (height * width)
