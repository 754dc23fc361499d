"""Find, replace, taper and fold norms in a model that already exists."""

from normsmith.surgery.checkpoint import CheckpointReport, fold_checkpoint
from normsmith.surgery.collapse import CollapseReport, collapse_
from normsmith.surgery.find import Site, Sites, find_norms
from normsmith.surgery.fold import FoldReport, fold_
from normsmith.surgery.gates import freeze_gates_
from normsmith.surgery.one_by_one import remove_one_by_one_
from normsmith.surgery.schedule import schedule_
from normsmith.surgery.swap import RestoreReport, SwapReport, restore_, swap_norms_
from normsmith.surgery.taper import taper_

__all__ = [
    "CheckpointReport",
    "CollapseReport",
    "FoldReport",
    "RestoreReport",
    "Site",
    "Sites",
    "SwapReport",
    "collapse_",
    "find_norms",
    "fold_",
    "fold_checkpoint",
    "freeze_gates_",
    "remove_one_by_one_",
    "restore_",
    "schedule_",
    "swap_norms_",
    "taper_",
]
