"""Find, replace, taper and fold norms in a model that already exists."""

from normsmith.surgery.checkpoint import CheckpointReport, fold_checkpoint
from normsmith.surgery.find import Site, Sites, find_norms
from normsmith.surgery.fold import FoldReport, fold_
from normsmith.surgery.swap import RestoreReport, SwapReport, restore_, swap_norms_
from normsmith.surgery.taper import taper_

__all__ = [
    "CheckpointReport",
    "FoldReport",
    "RestoreReport",
    "Site",
    "Sites",
    "SwapReport",
    "find_norms",
    "fold_",
    "fold_checkpoint",
    "restore_",
    "swap_norms_",
    "taper_",
]
