"""Training on transformers.Trainer: schedules, parameter groups by role, progress."""

from normsmith.training.arguments import TrainingConfig
from normsmith.training.callback import NormsmithCallback
from normsmith.training.optim import RebindReport, decayed_names, parameter_groups, rebind_optimizer_
from normsmith.training.progress import ProgressCallback, Reporter
from normsmith.training.trainer import Trainer

__all__ = [
    "NormsmithCallback",
    "ProgressCallback",
    "RebindReport",
    "Reporter",
    "Trainer",
    "TrainingConfig",
    "decayed_names",
    "parameter_groups",
    "rebind_optimizer_",
]
