"""One colour and dash pattern per arm, the same in every picture and in the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from normsmith.report.results import Results

# After Okabe and Ito, darkened or lightened until each has a contrast of 3:1 on its background. The first arm is what
# the others are compared with, so it is neutral.
_LIGHT = ("#4a5361", "#0072b2", "#d55e00", "#00875f", "#aa3f8f", "#8a6d00", "#5b4fc0")
_DARK = ("#b6bfcc", "#56b4e9", "#f5915a", "#2fc79a", "#e48ccb", "#e0c045", "#a59cf5")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

Dash = str | tuple[float, tuple[float, ...]]


@dataclass(frozen=True)
class Stroke:
    """How an arm is drawn; dashes tell arms apart when there are more arms than colours."""

    light: str
    dark: str
    dash: Dash


OTHER = Stroke("#a08767", "#b39b7a", "-")
DARK_OF = {**dict(zip(_LIGHT, _DARK, strict=True)), OTHER.light: OTHER.dark}
"""Colour on light pages → the same arm's on dark ones."""


def strokes_of(names: Iterable[str]) -> dict[str, Stroke]:
    """Arm name → stroke, in the order given."""
    count = len(_LIGHT)
    return {
        name: Stroke(_LIGHT[i % count], _DARK[i % count], _DASHES[i // count % len(_DASHES)])
        for i, name in enumerate(names)
    }


def strokes(results: Results) -> dict[str, Stroke]:
    """Arm name → stroke."""
    return strokes_of(arm.name for arm in results.arms)


def decode_stroke(name: str, known: dict[str, Stroke]) -> Stroke:
    """The stroke of the arm that a decode row belongs to: the same name, or that name with a suffix like `-folded`."""
    owners = [arm for arm in known if name == arm or (name.startswith(arm) and not name[len(arm)].isalnum())]
    return known[max(owners, key=len)] if owners else OTHER
