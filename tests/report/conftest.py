"""A realistic study: three arms of one small language model, 40 measurements each."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from normsmith.report import Arm, DecodeRow, Point, Results
from tests.report.synthetic import make

STEPS = 2000
POINTS = 40


def _noise(index: int, arm: int) -> float:
    return math.sin(12.9898 * (index + 1) + 78.233 * arm) * 0.045


def _curve(arm: int, final: float, taper: bool = False) -> tuple[Point, ...]:
    points = []
    for index in range(POINTS):
        step = STEPS * (index + 1) // POINTS
        smooth = final + (9.2 - final) * math.exp(-step / 260) + 0.35 * (1 - step / STEPS)
        progress = min(max((step - 400) / 1200, 0.0), 1.0)
        points.append(
            Point(
                step=step,
                loss=smooth - 0.03 + _noise(index, arm),
                validation_loss=smooth if index % 4 == 3 else None,
                gate=0.5 * (1 + math.cos(math.pi * progress)) if taper else None,
                learning_rate=1e-3 * (1 - step / STEPS),
                gradient_norm=0.8 + 4 * math.exp(-step / 300),
            )
        )
    return tuple(points)


def example_results() -> Results:
    recipe = {
        "data": {"source": "tinystories", "block": 256},
        "model": {"layers": 6, "width": 256, "heads": 8, "vocabulary": 4096},
        "training": {"max_steps": STEPS, "batch": 32, "learning_rate": 1e-3, "warmup": 0.05, "precision": "bf16"},
    }
    arms = (
        Arm(
            name="rmsnorm",
            label="RMSNorm (pre)",
            description="Pre-norm RMSNorm at every sublayer and before the head.",
            config={"norm": {"kind": "rmsnorm", "eps": 1e-6}, "connection": {"kind": "pre"}},
            parameters=6_822_400,
            seconds=412.6,
            validation_loss=3.4312,
            perplexity=math.exp(3.4312),
            gap_percent=0.0,
            curve=_curve(0, 3.4312),
            stream_scale=(0.02, 0.09, 0.16, 0.24, 0.33, 0.45, 0.6, 0.78, 1.0, 1.3, 1.7, 2.3, 3.4),
        ),
        Arm(
            name="taper",
            label="Internal taper",
            description="RMSNorm whose gate goes to 0 during training, so that it folds into the next linear layer.",
            config={"norm": {"kind": "tapered_rmsnorm"}, "schedule": {"kind": "taper", "warmup": 0.2, "end": 0.8}},
            parameters=6_822_400,
            seconds=431.9,
            validation_loss=3.4497,
            perplexity=math.exp(3.4497),
            gap_percent=0.539,
            fold_error=3.4e-6,
            curve=_curve(1, 3.4497, taper=True),
            stream_scale=(0.03, 0.1, 0.15, 0.21, 0.28, 0.36, 0.44, 0.52, 0.61, 0.71, 0.83, 0.97, 1.2),
        ),
        Arm(
            name="sphere",
            label="Sphere, p = 1",
            description="The stream stays on a sphere; no norm in front of the sublayers.",
            config={"norm": {"kind": "identity"}, "connection": {"kind": "sphere", "p": 1}},
            parameters=6_819_328,
            seconds=405.2,
            validation_loss=3.4088,
            perplexity=math.exp(3.4088),
            gap_percent=-0.653,
            curve=_curve(2, 3.4088),
            stream_scale=(1.0,) * 13,
        ),
    )
    decode = (
        DecodeRow(name="rmsnorm", label="RMSNorm (pre)", median=1112.4, low=1098.0, high=1121.7, ratio=1.0),
        DecodeRow(name="taper", label="Internal taper", median=1087.2, low=1071.3, high=1101.0, ratio=0.977),
        DecodeRow(
            name="taper-folded", label="Internal taper, folded", median=1287.9, low=1266.4, high=1302.5, ratio=1.158
        ),
        DecodeRow(name="never", label="Never had norms", median=1291.3, low=1271.8, high=1308.9, ratio=1.161),
    )
    return Results(
        title="Which normalisation does a small story model need?",
        command="normsmith reproduce spheretnorm --preset small --seed 0 --set training.max_steps=2000 -o report/",
        summary="The sphere connection ends 0.7 % below RMSNorm; tapering costs 0.5 % and decodes 1.16 times faster.",
        created="2025-06-01T12:00:00+00:00",
        seed=0,
        data={
            "source": "TinyStories excerpt",
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "train tokens": 4_194_304,
            "validation tokens": 131_072,
        },
        environment={
            "python": "3.11.9",
            "torch": "2.7.1",
            "transformers": "5.24.0",
            "cpu": "AMD EPYC 7763",
            "threads": "2",
        },
        recipe=recipe,
        arms=arms,
        decode=decode,
        notes=(
            "One seed: differences below about 0.01 nats are within the spread that other seeds show.",
            "Decode speed was measured with batch size 1 and 256 new tokens, arms interleaved.",
        ),
    )


@pytest.fixture
def results() -> Results:
    return example_results()


def gates(arm: int, seed: int, step: int) -> dict[str, Any]:
    if arm == 0:
        return {}
    layers = {f"c/layers.{i}": 1 + 0.1 * i + 0.01 * seed for i in range(12)}
    return {"gate_entropy": 0.69 - 0.01 * step, "novel_quantity": float(step), "weights": [0.1, 0.2, 0.7], **layers}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, three seeds, twenty steps; copy it before changing anything."""
    return make(tmp_path_factory.mktemp("studies") / "plain", log=gates)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three learning rates; the largest makes one arm diverge."""
    return make(
        tmp_path_factory.mktemp("studies") / "swept",
        sweep={"training.learning_rate": ("1e-3", "1e-2", "1e-1")},
        diverge=lambda cell: cell.point.endswith("1e-1") and cell.arm != "rmsnorm",
    )


@pytest.fixture
def study(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "st"))
