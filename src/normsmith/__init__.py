"""normsmith: choose, connect, remove and measure the normalisation layers of transformers.

Public names load on first use, so that `import normsmith` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normsmith.connections import Connection, connections, create_connection
    from normsmith.models import NormsmithConfig, NormsmithForCausalLM, preset_config
    from normsmith.norms import Norm, create_norm, norms
    from normsmith.schedules import Controller, TaperConfig, TaperController
    from normsmith.surgery import (
        FoldReport,
        RestoreReport,
        Site,
        SwapReport,
        find_norms,
        fold_,
        fold_checkpoint,
        restore_,
        swap_norms_,
        taper_,
    )
    from normsmith.training import NormsmithCallback, Trainer, rebind_optimizer_

__version__ = "0.1.0"

_HOME = {
    "Connection": "connections",
    "Controller": "schedules",
    "FoldReport": "surgery",
    "Norm": "norms",
    "NormsmithCallback": "training",
    "NormsmithConfig": "models",
    "NormsmithForCausalLM": "models",
    "Site": "surgery",
    "RestoreReport": "surgery",
    "SwapReport": "surgery",
    "TaperConfig": "schedules",
    "TaperController": "schedules",
    "Trainer": "training",
    "connections": "connections",
    "create_connection": "connections",
    "create_norm": "norms",
    "find_norms": "surgery",
    "fold_": "surgery",
    "fold_checkpoint": "surgery",
    "norms": "norms",
    "preset_config": "models",
    "rebind_optimizer_": "training",
    "restore_": "surgery",
    "swap_norms_": "surgery",
    "taper_": "surgery",
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "Connection",
    "Controller",
    "FoldReport",
    "Norm",
    "NormsmithCallback",
    "NormsmithConfig",
    "NormsmithForCausalLM",
    "RestoreReport",
    "Site",
    "SwapReport",
    "TaperConfig",
    "TaperController",
    "Trainer",
    "connections",
    "create_connection",
    "create_norm",
    "find_norms",
    "fold_",
    "fold_checkpoint",
    "norms",
    "preset_config",
    "rebind_optimizer_",
    "restore_",
    "swap_norms_",
    "taper_",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"normsmith.{_HOME[name]}"), name)
    raise AttributeError(f"module 'normsmith' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
