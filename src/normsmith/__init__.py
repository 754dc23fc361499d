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
    from normsmith.schedules import (
        Controller,
        GateController,
        GateFreezeConfig,
        OneByOneController,
        SequentialConfig,
        TaperConfig,
        TaperController,
    )
    from normsmith.surgery import (
        CollapseReport,
        FoldReport,
        RestoreReport,
        Site,
        SwapReport,
        collapse_,
        find_norms,
        fold_,
        fold_checkpoint,
        freeze_gates_,
        remove_one_by_one_,
        restore_,
        swap_norms_,
        taper_,
    )
    from normsmith.training import NormsmithCallback, Trainer, rebind_optimizer_

__version__ = "0.1.0"

_HOME = {
    "CollapseReport": "surgery",
    "Connection": "connections",
    "Controller": "schedules",
    "FoldReport": "surgery",
    "GateController": "schedules",
    "GateFreezeConfig": "schedules",
    "Norm": "norms",
    "NormsmithCallback": "training",
    "NormsmithConfig": "models",
    "NormsmithForCausalLM": "models",
    "OneByOneController": "schedules",
    "SequentialConfig": "schedules",
    "Site": "surgery",
    "RestoreReport": "surgery",
    "SwapReport": "surgery",
    "TaperConfig": "schedules",
    "TaperController": "schedules",
    "Trainer": "training",
    "collapse_": "surgery",
    "connections": "connections",
    "create_connection": "connections",
    "create_norm": "norms",
    "find_norms": "surgery",
    "fold_": "surgery",
    "fold_checkpoint": "surgery",
    "freeze_gates_": "surgery",
    "norms": "norms",
    "preset_config": "models",
    "rebind_optimizer_": "training",
    "remove_one_by_one_": "surgery",
    "restore_": "surgery",
    "swap_norms_": "surgery",
    "taper_": "surgery",
}

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "CollapseReport",
    "Connection",
    "Controller",
    "FoldReport",
    "GateController",
    "GateFreezeConfig",
    "Norm",
    "NormsmithCallback",
    "NormsmithConfig",
    "NormsmithForCausalLM",
    "OneByOneController",
    "RestoreReport",
    "SequentialConfig",
    "Site",
    "SwapReport",
    "TaperConfig",
    "TaperController",
    "Trainer",
    "collapse_",
    "connections",
    "create_connection",
    "create_norm",
    "find_norms",
    "fold_",
    "fold_checkpoint",
    "freeze_gates_",
    "norms",
    "preset_config",
    "rebind_optimizer_",
    "remove_one_by_one_",
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
