"""Training on transformers.Trainer: schedules, parameter groups by role, progress."""

from normsmith.training.anchoring import AnchoringCallback
from normsmith.training.arguments import TrainingConfig
from normsmith.training.average import WeightAverage
from normsmith.training.best import BestWeights
from normsmith.training.callback import NormsmithCallback
from normsmith.training.gates import GateSitesCallback
from normsmith.training.optim import RebindReport, decayed_names, parameter_groups, rebind_optimizer_
from normsmith.training.progress import ProgressCallback, Reporter
from normsmith.training.trainer import Trainer

__all__ = [
    "AnchoringCallback",
    "BestWeights",
    "GateSitesCallback",
    "NormsmithCallback",
    "ProgressCallback",
    "RebindReport",
    "Reporter",
    "Trainer",
    "TrainingConfig",
    "WeightAverage",
    "decayed_names",
    "parameter_groups",
    "rebind_optimizer_",
]
