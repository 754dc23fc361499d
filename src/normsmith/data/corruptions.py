"""The fifteen corruptions of CIFAR-10-C at five severities, for images of any size, and a reader of the official files.

Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations"
(arXiv 1903.12261): noise, blur, weather and digital corruptions. The strengths are ours, in the spirit of those for
32×32 pixels, and sizes are relative to the image: results compare models with each other, not with published tables,
for which `read_official` reads the published images.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from normsmith.data.image_files import as_classes
from normsmith.errors import InputError, UnknownNameError

Images = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
SEVERITIES = (1, 2, 3, 4, 5)


def corrupt(images: Images, name: str, severity: int, seed: int = 0) -> Images:
    """Images (n, h, w, c) uint8, c = 1 or 3, after one corruption; the same seed gives the same result, image by image.

    Args:
        images: at least 4×4 pixels.
        name: one of `CORRUPTIONS`.
        severity: 1 (hardly visible) to 5.
        seed: of what is random in it.

    Raises:
        InputError: another shape or type of images, an unknown name or severity, a negative seed.
    """
    _check(name, severity)
    if seed < 0:
        raise InputError(f"seed={seed}: is a whole number from 0 on")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3) or min(images.shape[1:3]) < 4:
        raise InputError(
            f"images of {images.dtype} and shape {images.shape} cannot be corrupted; expected uint8 "
            "(n, height, width, channels) with 1 or 3 channels and at least 4×4 pixels"
        )
    function, strengths = CORRUPTIONS[name]
    strength = strengths[severity - 1]
    out = np.empty_like(images)
    for number, image in enumerate(images):
        random = np.random.default_rng((seed, number))
        changed = function(image.astype(np.float64) / 255, strength, random)
        out[number] = np.round(np.clip(changed, 0, 1) * 255).astype(np.uint8)
    return out


def gaussian_noise(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """x + N(0, strength²)."""
    return x + random.normal(0, strength, x.shape)


def shot_noise(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Poisson(x·strength)/strength: the photons that a sensor counts."""
    return random.poisson(x * strength) / strength


def impulse_noise(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """A share of the values becomes 0 or 1."""
    hit, white = random.random(x.shape) < strength, random.random(x.shape) < 0.5
    return np.where(hit, white.astype(np.float64), x)


def defocus_blur(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Mean over a disk whose radius is a share of the image's width, and more than the half pixel that does nothing."""
    return _convolve(x, _disk(max(strength * _side(x), 0.5 + 5 * strength)))


def glass_blur(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Blur, take a share of the pixels from a place next to them, once or twice, blur again."""
    spread, share, rounds = strength
    blurred = _smooth(x, spread * _side(x))
    height, width = x.shape[:2]
    for _ in range(rounds):
        dy, dx = random.integers(-1, 2, (2, height, width)) * (random.random((height, width)) < share)
        rows = np.clip(np.arange(height)[:, None] + dy, 0, height - 1)
        columns = np.clip(np.arange(width)[None] + dx, 0, width - 1)
        blurred = blurred[rows, columns]
    return _smooth(blurred, spread * _side(x))


def motion_blur(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Mean along a line of random direction whose length is a share of the width, and more than the pixel itself."""
    return _convolve(x, _line(max(strength * _side(x), 1 + 4 * strength), random.uniform(-np.pi / 4, np.pi / 4)))


def zoom_blur(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Mean of the image and of enlarged copies, up to 1 + strength."""
    factors = np.linspace(1, 1 + strength, 8)
    return np.mean([_zoom(x, float(factor)) for factor in factors], axis=0)


def snow(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Brighten towards grey, and add streaks of flakes."""
    density, bright = strength
    flakes = (random.random(x.shape[:2]) < density).astype(np.float64)
    streaks = _convolve(flakes[..., None], _line(max(0.15 * _side(x), 2.0), random.uniform(0.5, 1.2))) * 2
    pale = np.maximum(x, x.mean(-1, keepdims=True) * 1.5 + 0.5)
    return (1 - bright) * x + bright * pale + np.clip(streaks, 0, 1)


def frost(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Mix with a bright fractal pattern, as ice on a window."""
    keep, add = strength
    ice = np.clip(_fractal(x.shape[:2], random, 1.5) * 1.2, 0, 1) ** 2
    return keep * x + add * ice[..., None]


def fog(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Add a smooth fractal pattern and keep the brightest value where it was."""
    amount, roughness = strength
    top = x.max() if x.max() > 0 else 1.0
    return (x + amount * _fractal(x.shape[:2], random, roughness)[..., None]) * top / (top + amount)


def brightness(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """x + strength."""
    return x + strength


def contrast(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """(x − mean)·strength + mean, for each channel."""
    mean = x.mean((0, 1), keepdims=True)
    return (x - mean) * strength + mean


def elastic_transform(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Move every pixel by a smooth random field whose size is a share of the width."""
    amount, smoothness = strength
    side, (height, width) = _side(x), x.shape[:2]
    fields = [ndimage.gaussian_filter(random.uniform(-1, 1, (height, width)), smoothness * side) for _ in range(2)]
    dy, dx = (field / max(float(np.abs(field).max()), 1e-12) * amount * side for field in fields)
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    at = np.stack((rows + dy, columns + dx))
    return np.stack([ndimage.map_coordinates(x[..., c], at, order=1, mode="reflect") for c in range(x.shape[-1])], -1)


def pixelate(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Shrink to `strength` of the size, by a pixel at least, by the mean of areas; enlarge again without smoothing."""
    from PIL import Image

    height, width = x.shape[:2]
    small = (min(round(width * strength), width - 1), min(round(height * strength), height - 1))
    channels = [Image.fromarray(np.ascontiguousarray(x[..., c], np.float32)) for c in range(x.shape[-1])]
    changed = [
        c.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.NEAREST) for c in channels
    ]
    return np.stack([np.asarray(c, np.float64) for c in changed], -1)


def jpeg_compression(x: Floats, strength: Any, random: np.random.Generator) -> Floats:
    """Save as JPEG of this quality and read again."""
    from PIL import Image

    values = np.round(np.clip(x, 0, 1) * 255).astype(np.uint8)
    image = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=strength)
    return np.asarray(Image.open(buffer), np.float64).reshape(x.shape) / 255


Corruption = tuple[Callable[[Floats, Any, np.random.Generator], Floats], tuple[Any, ...]]

CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": (gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": (shot_noise, (500, 250, 100, 75, 50)),
    "impulse_noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (defocus_blur, (0.02, 0.03, 0.04, 0.05, 0.06)),
    "glass_blur": (glass_blur, ((0.01, 0.3, 1), (0.012, 0.6, 1), (0.015, 0.9, 1), (0.017, 1, 2), (0.02, 1, 3))),
    "motion_blur": (motion_blur, (0.08, 0.12, 0.16, 0.2, 0.25)),
    "zoom_blur": (zoom_blur, (0.06, 0.11, 0.16, 0.21, 0.26)),
    "snow": (snow, ((0.004, 0.05), (0.008, 0.1), (0.012, 0.15), (0.018, 0.2), (0.024, 0.25))),
    "frost": (frost, ((1.0, 0.2), (1.0, 0.3), (0.97, 0.4), (0.94, 0.5), (0.9, 0.6))),
    "fog": (fog, ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))),
    "brightness": (brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": (elastic_transform, ((0.02, 0.2), (0.03, 0.15), (0.04, 0.12), (0.05, 0.1), (0.06, 0.08))),
    "pixelate": (pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (jpeg_compression, (80, 65, 58, 50, 40)),
}
"""Name → (function of one image (h, w, c) in [0, 1], its strength at severities 1 to 5)."""


def read_official(folder: str | Path, name: str, severity: int) -> tuple[Images, npt.NDArray[np.int64]]:
    """Images (n, h, w, c) and labels (n,) of one corruption and severity in a folder of CIFAR-10-C's `.npy` files.

    A file holds the five severities one after the other, `labels.npy` the labels.

    Raises:
        InputError: an unknown name or severity, or a file that is missing or of another size.
    """
    _check(name, severity)
    images, labels = open_official(folder, name)
    each = len(images) // len(SEVERITIES)
    part = slice((severity - 1) * each, severity * each)
    return np.array(images[part]), labels[part]


def open_official(folder: str | Path, name: str) -> tuple[Images, npt.NDArray[np.int64]]:
    """All severities of one corruption: images (5·n, h, w, c), left on the disk, and labels (5·n,).

    Raises:
        InputError: a file that is missing or of another size.
    """
    folder = Path(folder).expanduser()
    arrays: list[npt.NDArray[Any]] = []
    for path in (folder / f"{name}.npy", folder / "labels.npy"):
        try:
            array: Any = np.load(path, mmap_mode="r")
        except (OSError, EOFError, ValueError) as error:
            raise InputError(f"{path}: cannot be read as a NumPy array ({error})") from None
        if not isinstance(array, np.ndarray):
            raise InputError(f"{path}: holds an archive of arrays, expected one array")
        arrays.append(cast("npt.NDArray[Any]", array))
    images, labels = arrays[0], as_classes(arrays[1], folder / "labels.npy")
    if not images.ndim:
        raise InputError(f"{folder}: {name}.npy holds a number, not images")
    wrong = images.ndim != 4 or images.dtype != np.uint8 or not len(images) or len(images) % len(SEVERITIES)
    if wrong or len(labels) != len(images):
        raise InputError(
            f"{folder}: {name}.npy holds {images.dtype} {images.shape} and labels.npy {len(labels)} labels; expected "
            "uint8 (5·n, height, width, channels) and 5·n labels"
        )
    return images, labels


def _check(name: str, severity: int) -> None:
    if name not in CORRUPTIONS:
        raise UnknownNameError("corruption", name, CORRUPTIONS)
    whole = isinstance(severity, int | np.integer) and not isinstance(severity, bool)
    if not whole or severity not in SEVERITIES:
        raise InputError(f"severity={severity!r}: is a whole number from 1 to 5")


def _side(x: Floats) -> float:
    return float(min(x.shape[:2]))


def _convolve(x: Floats, kernel: Floats) -> Floats:
    return np.stack([ndimage.convolve(x[..., c], kernel, mode="reflect") for c in range(x.shape[-1])], axis=-1)


def _smooth(x: Floats, spread: float) -> Floats:
    return ndimage.gaussian_filter(x, (spread, spread, 0), mode="reflect")


def _disk(radius: float) -> Floats:
    """Disk with a soft border, so that radii below one pixel blur a little too; sums to 1."""
    reach = int(np.ceil(radius))
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    kernel = np.clip(radius + 0.5 - np.hypot(y, x), 0, 1)
    return kernel / kernel.sum()


def _line(length: float, angle: float) -> Floats:
    """A line through the centre with soft ends and edges; sums to 1."""
    reach = int(np.ceil(length / 2))
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    kernel = np.clip(length / 2 + 0.5 - np.abs(along), 0, 1) * np.clip(1 - np.abs(across), 0, 1)
    return kernel / kernel.sum()


def _zoom(x: Floats, factor: float) -> Floats:
    """The middle of the image enlarged by `factor` to the old size."""
    height, width = x.shape[:2]
    rows = (np.arange(height) - (height - 1) / 2) / factor + (height - 1) / 2
    columns = (np.arange(width) - (width - 1) / 2) / factor + (width - 1) / 2
    at = np.stack(np.meshgrid(rows, columns, indexing="ij"))
    return np.stack([ndimage.map_coordinates(x[..., c], at, order=1, mode="nearest") for c in range(x.shape[-1])], -1)


def _fractal(shape: tuple[int, ...], random: np.random.Generator, roughness: float) -> Floats:
    """A random pattern in [0, 1], coarse waves stronger than fine ones by `roughness` for each octave."""
    height, width = shape
    total, weight, cells = np.zeros((height, width)), 1.0, 2
    while cells <= max(height, width):
        grid = random.random((cells + 1, cells + 1))
        at = np.stack(np.meshgrid(np.linspace(0, cells, height), np.linspace(0, cells, width), indexing="ij"))
        total += weight * ndimage.map_coordinates(grid, at, order=1, mode="nearest")
        weight, cells = weight / roughness, cells * 2
    low, high = total.min(), total.max()
    return (total - low) / (high - low) if high > low else total
