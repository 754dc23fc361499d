"""Images with one class each: scikit-learn's digits, local files, data sets of the Hub."""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from normsmith.data import image_files
from normsmith.data.augment import Augmentation
from normsmith.data.config import SourceConfig
from normsmith.data.examples import Examples, TaskData, check_size, complete_splits, hash_parts
from normsmith.data.facts import Facts
from normsmith.data.sources import is_hub
from normsmith.errors import InputError

Image = npt.NDArray[np.uint8]
Labelled = tuple[Image, int]


class ImagesConfig(SourceConfig):
    """Images to classify.

    Attributes:
        kind: `images`.
        source: `digits` (scikit-learn's 1,797 images of 8×8, no download), a folder or file as `image_files` reads
            them, or the name of a Hub data set (`hub:NAME` forces the last one).
        subset: configuration name of a Hub data set.
        validation_fraction: share of the training images that decides between models, where the source has no split of
            its own for that.
        test_fraction: the same for a test split.
        max_train: use this many training images, the first of an order by hash; default all.
        crop: pixels of zeros around a training image before a crop of the old size is cut from a random place.
        flip: mirror a training image left to right with probability ½.
        mixup: α of Beta(α, α), from which the share of another image and of its label is drawn (arXiv 1710.09412).
        cutmix: α of Beta(α, α) for the area of a rectangle that is pasted from another image (arXiv 1905.04899).
        mix_probability: probability that a training image is mixed at all; with both, each kind has half of it.
    """

    kind: Literal["images"] = "images"
    source: str = Field(default="digits", min_length=1)
    subset: str | None = None
    validation_fraction: float = Field(default=0.1, gt=0, lt=0.5)
    test_fraction: float = Field(default=0.2, gt=0, lt=0.5)
    max_train: int | None = Field(default=None, ge=1)
    crop: int = Field(default=0, ge=0)
    flip: bool = False
    mixup: float = Field(default=0.0, ge=0)
    cutmix: float = Field(default=0.0, ge=0)
    mix_probability: float = Field(default=1.0, ge=0, le=1)

    def facts(self) -> Facts:
        """Of digits exactly; of other sources a common size, as long as they are not read."""
        size, channels = ((8, 8), 1) if self.source == "digits" else ((32, 32), 3)
        return Facts(labels=tuple(str(n) for n in range(10)), image_size=size, channels=channels)


def _moments(images: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.float64]]:
    """Mean and deviation per channel of pixels in [0, 1], counted, so that no copy of all images as floats is made."""
    levels = np.arange(256) / 255
    channels = range(images.shape[-1])
    counts = np.stack([sum(np.bincount(i[..., c].ravel(), minlength=256) for i in images) for c in channels])
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ levels
    return {"mean": mean, "scale": np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(axis=1))}


def load_images(config: ImagesConfig) -> TaskData:
    """Read images and labels, split them, and describe what a model must know.

    Raises:
        InputError: the source cannot be read, images of unequal shape, a label without a class, an empty split.
    """
    raw, names = _read(config)
    count = sum(len(images) for images, _ in raw.values())
    splits = {name: _pairs(images, labels, names, name, config.source) for name, (images, labels) in raw.items()}
    notes = complete_splits(splits, lambda pair: _key(pair[0]), config.validation_fraction, config.test_fraction)
    check_size(splits, config.source)
    if config.max_train is not None and config.max_train < len(splits["train"]):
        splits["train"] = sorted(splits["train"], key=lambda pair: _key(pair[0]))[: config.max_train]
        notes.append(f"only {config.max_train} of the training images are used")
    shapes = {name: sorted({image.shape for image, _ in pairs}) for name, pairs in splits.items()}
    expected = shapes["train"][0]
    if wrong := next(((n, s) for n, found in shapes.items() for s in found if s != expected), None):
        raise InputError(
            f"{config.source}: the {wrong[0]} split has an image of {_size(wrong[1])}, the training split of "
            f"{_size(expected)}; all images must have one size and number of channels"
        )
    examples = {name: _examples(pairs) for name, pairs in splits.items()}
    train = cast("npt.NDArray[np.uint8]", examples["train"].columns["image"])
    height, width, channels = expected
    augmentation = Augmentation(config.crop, config.flip, config.mixup, config.cutmix, config.mix_probability, names)
    return TaskData(
        train=examples["train"],
        validation=examples["validation"],
        test=examples["test"],
        facts=Facts(labels=names, image_size=(height, width), channels=channels),
        data_hash=hash_parts(*(bytes(part) for name in examples for part in _parts(examples[name]))),
        source=config.source,
        notes=(f"{count:,} images in {len(names)} classes", *notes),
        moments=_moments(train),
        change=augmentation if augmentation.active else None,
    )


def finish(row: dict[str, Any]) -> dict[str, Tensor]:
    """Pixels (h, w, c) uint8 → (c, h, w) float32 in [0, 1], and the class."""
    pixels = torch.from_numpy(np.array(row["image"])).movedim(-1, 0).float() / 255
    return {"pixel_values": pixels, "labels": torch.tensor(int(row["label"]))}


def _examples(pairs: list[Labelled]) -> Examples:
    images, labels = np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs])
    return Examples({"image": images, "label": labels}, finish)


def _parts(examples: Examples) -> tuple[bytes, bytes]:
    image, label = (np.asarray(examples.columns[name]) for name in ("image", "label"))
    return image.tobytes(), label.astype(np.int64).tobytes()


def _key(image: Image) -> str:
    return hash_parts(str(image.shape).encode(), image.tobytes())


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]} pixels and {shape[2]} channel(s)"


def _read(config: ImagesConfig) -> tuple[dict[str, image_files.Split], tuple[str, ...]]:
    if config.source == "digits":
        return _digits()
    if is_hub(config.source):
        return image_files.read_hub(config.source, config.subset)
    return image_files.read_path(config.source)


def _digits() -> tuple[dict[str, image_files.Split], tuple[str, ...]]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # ships no types

    bunch: Any = load_digits()
    images = np.asarray(np.round(bunch.images * (255 / 16)), np.uint8)[..., None]  # 17 grey values
    return {"train": (images, np.asarray(bunch.target))}, tuple(str(n) for n in range(10))


def _pairs(images: Any, labels: Any, names: tuple[str, ...], split: str, source: str) -> list[Labelled]:
    if len(images) != len(labels):
        raise InputError(f"{source}: the {split} split has {len(images)} images and {len(labels)} labels")
    for row, label in enumerate(labels):
        if not 0 <= int(label) < len(names):
            raise InputError(
                f"{source}: image {row} of the {split} split has the label {int(label)}, but there are "
                f"{len(names)} classes, 0 to {len(names) - 1}"
            )
    return [(image, int(label)) for image, label in zip(images, labels, strict=True)]
