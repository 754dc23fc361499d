"""The fifteen corruptions: what they keep, what each does, and the official files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits, load_sample_image

from normsmith.data import corruptions as C
from normsmith.errors import InputError

RANDOM = np.random.default_rng(0)
NAMES = list(C.CORRUPTIONS)


@pytest.fixture(scope="module")
def photos() -> C.Images:
    """Eight pieces of a real photograph, 32×32."""
    photo = load_sample_image("china.jpg")[:384:2, :512:2]
    return np.stack([photo[y : y + 32, x : x + 32] for y in (60, 100) for x in (20, 90, 150, 200)])


def distance(a: Any, b: Any) -> float:
    return float(np.abs(a.astype(float) - b.astype(float)).mean())


def test_there_are_fifteen() -> None:
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_severity_grows_and_the_seed_decides(name: str, photos: C.Images) -> None:
    before = photos.copy()
    changed = [C.corrupt(photos, name, severity, seed=3) for severity in C.SEVERITIES]
    assert np.array_equal(photos, before)
    assert all(c.dtype == np.uint8 and c.shape == photos.shape for c in changed)
    distances = [distance(c, photos) for c in changed]
    assert 0.3 < distances[0] < distances[2] < distances[4] < 90
    assert distances == sorted(distances)
    assert np.array_equal(C.corrupt(photos, name, 3, seed=3), changed[2])
    assert np.array_equal(C.corrupt(photos[:2], name, 3, seed=3), changed[2][:2])  # image by image
    random = {"gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur", "snow", "frost", "fog"}
    other = np.array_equal(C.corrupt(photos, name, 3, seed=4), changed[2])
    assert other == (name not in {*random, "elastic_transform"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 8, 8, 1), (1, 28, 20, 1), (1, 5, 4, 3)])
def test_any_size_and_channels(name: str, shape: tuple[int, ...]) -> None:
    for value in (0, 255, None):
        images = RANDOM.integers(0, 256, shape, np.uint8) if value is None else np.full(shape, value, np.uint8)
        out = C.corrupt(images, name, 5)
        assert (out.shape, out.dtype) == (shape, np.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_small_images_are_changed_at_every_severity(name: str) -> None:
    digits = (load_digits().images[:20, ..., None] * 15.9).astype(np.uint8)
    distances = [distance(C.corrupt(digits, name, severity), digits) for severity in C.SEVERITIES]
    assert distances[0] > 0.3
    assert distances[0] < distances[4]
    assert all(b >= 0.9 * a for a, b in itertools.pairwise(distances))  # 5 and 6 of 8 pixels blur about alike


def test_noise_has_the_moments_it_names() -> None:
    x = np.full((200, 200, 3), 0.5)
    assert C.gaussian_noise(x, 0.1, RANDOM).std() == pytest.approx(0.1, rel=0.02)
    shot = C.shot_noise(x, 50, RANDOM)
    assert (shot.mean(), shot.std()) == (pytest.approx(0.5, rel=0.01), pytest.approx((0.5 / 50) ** 0.5, rel=0.02))
    hit = C.impulse_noise(x, 0.07, RANDOM)
    assert (hit != 0.5).mean() == pytest.approx(0.07, rel=0.05)
    assert hit.mean() == pytest.approx(0.5, abs=0.002)


def test_blurs_keep_the_mean_and_flat_areas() -> None:
    flat = np.full((32, 32, 3), 0.25)
    point = np.zeros((33, 33, 1))
    point[16, 16] = 1
    for blur, strength in ((C.defocus_blur, 0.06), (C.motion_blur, 0.25), (C.glass_blur, (0.02, 1, 1))):
        np.testing.assert_allclose(blur(flat, strength, RANDOM), 0.25, atol=1e-12)
    for blur, strength in ((C.defocus_blur, 0.06), (C.motion_blur, 0.25)):
        spread = blur(point, strength, RANDOM)
        assert spread.sum() == pytest.approx(1)
        assert spread.max() < 0.5
    rows, columns = np.nonzero(C.motion_blur(point, 0.3, RANDOM)[..., 0])
    assert columns.max() - columns.min() >= 6  # along the line, and less across it
    np.testing.assert_allclose(C.zoom_blur(flat, 0.26, RANDOM), 0.25, atol=1e-12)
    assert np.array_equal(C._zoom(point, 1.0), point)
    block = np.zeros((33, 33, 1))
    block[12:21, 12:21] = 1
    assert C._zoom(block, 2.0).sum() == pytest.approx(4 * block.sum(), rel=0.1)


def test_brightness_contrast_and_pixelate_against_their_formulas() -> None:
    x = RANDOM.random((16, 16, 3))
    np.testing.assert_allclose(C.brightness(x, 0.2, RANDOM), x + 0.2)
    low = C.contrast(x, 0.3, RANDOM)
    np.testing.assert_allclose(low.mean((0, 1)), x.mean((0, 1)))
    np.testing.assert_allclose(low.std((0, 1)), 0.3 * x.std((0, 1)))
    half = C.pixelate(x, 0.5, RANDOM)
    expected = x.reshape(8, 2, 8, 2, 3).mean((1, 3)).repeat(2, 0).repeat(2, 1)
    np.testing.assert_allclose(half, expected, atol=1e-6)


def test_fractal_patterns_fill_the_range_and_are_smooth() -> None:
    smooth, rough = (C._fractal((32, 32), np.random.default_rng(1), roughness) for roughness in (3.0, 1.0))
    assert (smooth.min(), smooth.max()) == (0, 1)
    assert np.abs(np.diff(smooth)).mean() < np.abs(np.diff(rough)).mean()


def test_the_official_files_are_read_by_severity(tmp_path: Path) -> None:
    images = np.arange(5 * 4)[:, None, None, None] * np.ones((1, 32, 32, 3))
    np.save(tmp_path / "fog.npy", images.astype(np.uint8))
    np.save(tmp_path / "labels.npy", np.tile([3, 1, 4, 1], 5))
    found, labels = C.read_official(tmp_path, "fog", 2)
    assert found[:, 0, 0, 0].tolist() == [4, 5, 6, 7]
    assert labels.tolist() == [3, 1, 4, 1]
    np.save(tmp_path / "labels.npy", np.arange(3))
    with pytest.raises(InputError, match=r"fog.npy holds uint8 \(20, 32, 32, 3\) and labels.npy 3 labels"):
        C.read_official(tmp_path, "fog", 2)
    (tmp_path / "frost.npy").write_text("no array")
    with pytest.raises(InputError, match="frost.npy: cannot be read as a NumPy array"):
        C.read_official(tmp_path, "frost", 1)


@pytest.mark.parametrize(
    ("images", "name", "severity", "message"),
    [
        (np.zeros((1, 8, 8, 3), np.uint8), "fogg", 1, "unknown corruption 'fogg'; did you mean 'fog'"),
        (np.zeros((1, 8, 8, 3), np.uint8), "fog", 6, "severity=6: is a whole number from 1 to 5"),
        (np.zeros((1, 8, 8, 3), np.uint8), "fog", True, "severity=True: is a whole number from 1 to 5"),
        (np.zeros((1, 8, 8, 3)), "fog", 1, "images of float64"),
        (np.zeros((1, 3, 8, 8), np.uint8), "fog", 1, r"shape \(1, 3, 8, 8\)"),
    ],
)
def test_what_cannot_be_corrupted(images: Any, name: str, severity: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        C.corrupt(images, name, severity)


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(InputError, match="seed=-1: is a whole number from 0 on"):
        C.corrupt(np.zeros((1, 8, 8, 3), np.uint8), "fog", 1, seed=-1)
