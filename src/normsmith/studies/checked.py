"""What the runs of a study must hold, remembered, so that a study can be read without torch.

Whether a run's recipe.yaml is the study's follows from the arms and their configurations, which takes the import of
torch and transformers: longer than all the reading. The answer is kept as hashes in `STUDY/.recipes.json`, a cache that
belongs to one plan and one version and may be deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import normsmith
from normsmith.config import Config
from normsmith.errors import InputError
from normsmith.report.results import write_text
from normsmith.studies.files import CHECKED, PLAN, RECIPE

if TYPE_CHECKING:
    from normsmith.studies.study import Cell, Study


class KnownCell(Config):
    """One run: where it is, what its recipe.yaml may hash to, and the recipe whose initial weights it shares."""

    arm: str
    point: str
    seed: int
    folder: Path
    sha256: tuple[str, ...]
    start: Path

    @property
    def label(self) -> str:
        """As `study.Cell.label`."""
        return ", ".join(part for part in (self.arm, self.point, f"seed {self.seed}") if part)

    def fits(self, text: str) -> bool:
        """Whether a recipe.yaml is this run's."""
        return _hash(text) in self.sha256


class _Known(Config):
    plan: str
    normsmith: str
    test_split: bool
    points: dict[str, dict[str, str]]
    cells: tuple[KnownCell, ...]
    changes: dict[str, dict[str, tuple[Any, Any]]]


@dataclass(frozen=True)
class KnownPlan:
    """The plan as plain values; `base` is the recipe that all arms share."""

    normsmith: str
    command: str
    data_sha256: str
    base: dict[str, Any]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    sweep: dict[str, tuple[str, ...]]


class KnownStudy:
    """A study for reading. `changes` says for each arm which settings it changes: key → (shared value, own value)."""

    def __init__(self, folder: Path, mapping: Mapping[str, Any], known: _Known) -> None:
        self.folder, self.test_split, self.changes = folder, known.test_split, known.changes
        self.points: Mapping[str, dict[str, str]] = known.points
        self._cells = known.cells
        self.plan = KnownPlan(
            normsmith=mapping["normsmith"],
            command=mapping.get("command", ""),
            data_sha256=mapping["data_sha256"],
            base=mapping["base"],
            arms=tuple(mapping["arms"]),
            seeds=tuple(mapping["seeds"]),
            sweep={key: tuple(values) for key, values in mapping.get("sweep", {}).items()},
        )

    @cached_property
    def cells(self) -> tuple[KnownCell, ...]:
        """All runs, with their folders below the study's, wherever that has been moved to."""
        return tuple(
            cell.model_copy(update={"folder": self.folder / cell.folder, "start": self.folder / cell.start})
            for cell in self._cells
        )


def open_study(folder: Path) -> KnownStudy:
    """The study in `folder`, without torch where its recipes were checked before.

    Raises:
        InputError: as `load_study`.
    """
    mapping = _read(folder / PLAN)
    known = None if mapping is None else _remembered(folder, mapping)
    if mapping is not None and known is not None:
        return KnownStudy(folder, mapping, known)
    from normsmith.studies.study import load_study

    study = load_study(folder)
    mapping = study.plan.to_dict()
    known = _learn(study, mapping)
    with contextlib.suppress(InputError):  # a study that may only be read is read all the same
        write_text(folder / CHECKED, known.model_dump_json() + "\n")
    return KnownStudy(folder, mapping, known)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        loaded: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else None


def _remembered(folder: Path, mapping: dict[str, Any]) -> _Known | None:
    loaded = _read(folder / CHECKED)
    try:
        known = None if loaded is None else _Known(**loaded)
    except (InputError, TypeError):
        return None
    fits = known is not None and (known.plan, known.normsmith) == (_plan_hash(mapping), normsmith.__version__)
    return known if fits else None


def _learn(study: Study, mapping: dict[str, Any]) -> _Known:
    from normsmith.studies.arms import arm_recipe

    folders = {(cell.arm, cell.point, cell.seed): cell.folder.relative_to(study.folder) for cell in study.cells}
    cells = [
        KnownCell(
            arm=cell.arm,
            point=cell.point,
            seed=cell.seed,
            folder=folders[cell.arm, cell.point, cell.seed],
            sha256=_hashes(cell),
            start=folders[study.plan.arms[0], cell.point, cell.seed] / RECIPE,
        )
        for cell in study.cells
    ]
    base = study.plan.base.to_dict()
    return _Known(
        plan=_plan_hash(mapping),
        normsmith=normsmith.__version__,
        test_split=study.test_split,
        points=study.points,
        cells=tuple(cells),
        changes={arm: differences(base, arm_recipe(study.plan.base, arm).to_dict()) for arm in study.plan.arms},
    )


def _hashes(cell: Cell) -> tuple[str, ...]:
    """Of the text that this version writes for the run, and of what is there if that is the same recipe."""
    texts = [cell.recipe_text]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = (cell.folder / RECIPE).read_text(encoding="utf-8")
        texts += [found] if cell.fits(found) else []
    return tuple(dict.fromkeys(_hash(text) for text in texts))


def differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) for every setting that differs; a part that is new or gone is one setting."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {path: (old, new)}
    left, right = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*left, *(key for key in right if key not in left)]:
        found |= differences(left.get(key), right.get(key), f"{path}.{key}" if path else key)
    return found


def _plan_hash(mapping: dict[str, Any]) -> str:
    # Without the command, which is for the reader only and differs from one call to the next.
    return _hash(json.dumps({key: value for key, value in mapping.items() if key != "command"}, sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
