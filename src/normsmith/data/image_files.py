"""Readers of image files: IDX, sheets of images, NumPy archives, and data sets of the Hub."""

from __future__ import annotations

import gzip
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from normsmith.errors import InputError

Split = tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]
Read = tuple[dict[str, Split], tuple[str, ...]]

_SHEETS = {28 * 28: (28, 28, 1), 32 * 32: (32, 32, 3)}  # width of a sheet → shape of the image in each of its rows
_MNIST_TRAIN = 60_000
FORMS = (
    "IDX files (train-images-idx3-ubyte and so on, also .gz), sheets with one image per row (mnist_batch_0.png, "
    "cifar10_batch_0.png) beside their labels, or .npz archives (x and y) named train, validation and test"
)


def read_path(source: str) -> Read:
    """Read the images of a folder, or of one `.npz` archive, as split name → (images (n, h, w, c) uint8, labels (n,)).

    A folder holds IDX files as MNIST and Fashion-MNIST have them, PNG sheets with one image per row (784 grey pixels,
    or 1024 in colour) and their labels (`*labels.js` or `*labels.npy`), or archives whose names tell their split.
    Where a folder has a split twice, IDX files come first, then archives.

    Raises:
        InputError: none of these, or a file that does not hold what its name says.
    """
    root = Path(source).expanduser()
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    splits: dict[str, Split] = {}
    for reader in (_idx, _archives, _sheets):
        for name, split in reader(files).items():
            splits.setdefault(name, split)
    if not splits:
        raise InputError(f"{source}: holds no images that normsmith reads; it reads {FORMS}")
    if "train" not in splits:
        raise InputError(f"{source}: has no training split, only {', '.join(splits)}")
    return splits, tuple(str(n) for n in range(_classes(splits["train"][1], source)))


def _classes(labels: npt.NDArray[Any], source: str) -> int:
    # Counting up to the largest label would take one wrong label for hundreds of classes.
    present = np.unique(labels)
    if len(present) and (present[0] < 0 or present[-1] >= len(present)):
        odd = present[0] if present[0] < 0 else present[-1]
        raise InputError(
            f"{source}: image {int(np.argmax(labels == odd))} of the training split has the label {int(odd)}, but the "
            f"labels must be 0 to {len(present) - 1} for its {len(present)} classes"
        )
    return len(present)


def _split_name(path: Path) -> str | None:
    name = path.name.lower()
    words = {"train": "train", "t10k": "test", "test": "test", "valid": "validation", "dev": "validation"}
    return next((split for word, split in words.items() if word in name), None)


def _idx(files: list[Path]) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    for path in files:
        split = _split_name(path)
        if "images-idx3" not in path.name or split is None:
            continue
        beside = path.with_name(path.name.replace("images-idx3", "labels-idx1"))
        if not beside.is_file():
            raise InputError(f"{path}: its labels {beside.name} are missing")
        splits[split] = (read_idx(path)[..., None], read_idx(beside))
    return splits


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of bytes, gzipped or not."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise InputError(f"{path}: is no IDX file of bytes, it begins with {data[:4].hex(' ')}")
    shape = struct.unpack_from(f">{data[3]}I", data, 4) if len(data) >= 4 + 4 * data[3] else (0,)
    body = data[4 + 4 * data[3] :]
    if len(body) != int(np.prod(shape)):
        raise InputError(f"{path}: holds {len(body)} bytes, its header says {'×'.join(map(str, shape))}")
    return np.frombuffer(body, np.uint8).reshape(shape)


def _archives(files: list[Path]) -> dict[str, Split]:
    archives = [path for path in files if path.suffix == ".npz"]
    splits: dict[str, Split] = {}
    for path in archives:
        split = _split_name(path) or ("train" if len(archives) == 1 and len(files) == 1 else None)
        if split is None:
            continue
        try:
            with path.open("rb") as file, np.load(file) as loaded:  # NumPy leaves a file that is damaged open
                held = {key: loaded[key] for key in loaded}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(f"{path}: cannot be read as a NumPy archive ({error})") from None
        if not {"x", "y"} <= held.keys():
            raise InputError(f"{path}: holds {', '.join(held)}; an archive of images has x (images) and y (labels)")
        splits[split] = (_as_images(held["x"], path), as_classes(held["y"], path))
    return splits


def _as_images(array: npt.NDArray[Any], path: Path) -> npt.NDArray[np.uint8]:
    array = array[..., None] if array.ndim == 3 else array
    if array.ndim != 4 or array.dtype != np.uint8 or array.shape[-1] not in (1, 3):
        raise InputError(
            f"{path}: its images are {array.dtype} of shape {array.shape}; expected uint8 (n, height, width, channels) "
            "with 1 or 3 channels"
        )
    return cast("npt.NDArray[np.uint8]", array)


def as_classes(array: Any, path: Path) -> npt.NDArray[np.int64]:
    """Labels (n,) or (n, 1) of a file as (n,) int64; anything but whole numbers is refused."""
    array = np.asarray(array)
    flat = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if flat.ndim != 1 or flat.dtype.kind not in "iu":
        raise InputError(
            f"{path}: its labels are {array.dtype} of shape {array.shape}; expected whole numbers (n,), one class per "
            "image"
        )
    return flat.astype(np.int64)


def _sheets(files: list[Path]) -> dict[str, Split]:
    numbered = {int(m[1]): p for p in files if (m := re.fullmatch(r".*_batch_(\d+)\.png", p.name))}
    if not numbered:
        return {}
    if (gap := next((n for n in range(len(numbered)) if n not in numbered), None)) is not None:
        raise InputError(
            f"{files[0].parent}: the sheet number {gap} is missing, so it is not known which labels the later ones have"
        )
    sheets = [_sheet(numbered[number]) for number in sorted(numbered)]
    if len({sheet.shape[1:] for sheet in sheets}) > 1:
        raise InputError(f"{files[0].parent}: its sheets are not of one kind of image")
    images = np.concatenate(sheets)
    labels = _sheet_labels(files)
    if len(labels) < len(images):
        raise InputError(f"{files[0].parent}: {len(images)} images on the sheets, but labels for {len(labels)} only")
    # The sheets of MNIST go on with test images after the 60,000 of the training split.
    border = _MNIST_TRAIN if images.shape[1:] == (28, 28, 1) else len(images)
    parts = {"train": slice(0, border), "test": slice(border, len(images))}
    return {name: (images[part], labels[: len(images)][part]) for name, part in parts.items() if len(images[part])}


def _sheet(path: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            shape = _SHEETS.get(image.width)
            if shape is None:
                raise InputError(
                    f"{path}: is {image.width} pixels wide; a sheet has one image in each row, of 784 or 1024 pixels"
                )
            pixels = np.asarray(image.convert("L" if shape[2] == 1 else "RGB"))
    except (UnidentifiedImageError, OSError) as error:
        raise InputError(f"{path}: cannot be read as an image ({error})") from None
    return pixels.reshape(-1, *shape)


def _sheet_labels(files: list[Path]) -> npt.NDArray[np.int64]:
    for path in files:
        try:
            if path.name.endswith("labels.npy"):
                return as_classes(np.load(path), path)
            if path.name.endswith("labels.js"):
                return np.array([int(n) for n in re.findall(r"\d+", path.read_text("utf-8"))], np.int64)
        except (OSError, EOFError, ValueError) as error:
            raise InputError(f"{path}: its labels cannot be read ({error})") from None
    raise InputError(f"{files[0].parent}: no labels beside the sheets; expected a file *labels.npy or *labels.js")


def read_hub(source: str, subset: str | None) -> Read:
    """Read a Hub data set with an image and a class label per row, whatever its columns are called."""
    import datasets

    name = source.removeprefix("hub:")
    try:
        loaded: Any = datasets.load_dataset(name, subset)
    except Exception as error:  # datasets raises whatever its file readers and the network raise
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise InputError(f"{name}: the data set cannot be read: {reason}; check the name, subset, network") from None
    splits: dict[str, Split] = {}
    classes: tuple[str, ...] = ()
    for split, rows in loaded.items():
        features = rows.features
        images = [c for c, f in features.items() if isinstance(f, datasets.Image)]
        labels = [c for c, f in features.items() if isinstance(f, datasets.ClassLabel)]
        if not images or not labels:
            raise InputError(f"{name}: needs an image and a class label per row, its columns are {', '.join(features)}")
        label = "fine_label" if "fine_label" in labels else labels[0]  # CIFAR-100 has coarse ones too
        classes = tuple(features[label].names)
        named = "validation" if split.startswith("valid") else split
        if named in ("train", "validation", "test") and min(rows[label], default=0) >= 0:  # -1: labels are withheld
            pixels = [_pixels(row, f"{name}: image {i} of {split}") for i, row in enumerate(rows[images[0]])]
            splits[named] = (cast("Any", pixels), np.array(rows[label]))
    if "train" not in splits:
        raise InputError(f"{name}: has no split called train, only {', '.join(loaded)}")
    return splits, classes


def _pixels(image: Any, where: str) -> npt.NDArray[np.uint8]:
    """A picture of Pillow's as (h, w, 1) if it is grey, else (h, w, 3); what lies behind transparency is shown."""
    grey, colour = ("1", "L", "LA", "La"), ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")
    if image.mode in grey:
        return np.asarray(image.convert("L"))[..., None]
    if image.mode in colour:
        return np.asarray(image.convert("RGB"))
    raise InputError(f"{where} has pixels of the sort {image.mode!r}; normsmith reads grey and colour of 8 bits")
